"""The operator: reconciles a VLMService into pools of pods, and says why."""
