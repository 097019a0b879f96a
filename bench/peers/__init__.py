"""Other engines that run the same model on the same CPU: one worker process each."""
