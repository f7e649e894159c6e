"""What tests share: checkpoints, jobs, layouts, models, damage. It is the only thing of `tests` that others import."""
