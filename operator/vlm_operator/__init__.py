"""The operator: reconciles VLMServices into pools of pods, with a reason for each decision."""
