"""Training of the demonstration checkpoints: data, the loop, a trigram to be beaten, and the model card."""
