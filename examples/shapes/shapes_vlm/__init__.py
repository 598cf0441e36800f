"""The pictures, questions, training and evaluation behind the model in ../model."""
