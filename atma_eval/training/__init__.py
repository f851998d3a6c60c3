"""Training: recipes, data, objective, optimisers, the loop, and the model card of what came out."""
