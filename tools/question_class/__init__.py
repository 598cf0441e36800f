"""Trains and evaluates the classifier of questions, `vlm_worker.gateway.question_class`.

wordings   wordings and slots as text files, and the questions that are generated from them
train      softmax regression by gradient descent, rounded to int8
evaluate   accuracy on wordings that a training did not see
"""
