"""Saves a checkpoint with the real `save_checkpoint` whose optimizer contains noise, without training, at any size.

For jobs without data parallelism: each rank has its whole parameters, and their weights are derived from the masters.
"""

from __future__ import annotations

import live_job
from live_job import training


def main() -> None:
    """Build, fill, save as iteration 4."""
    arguments = live_job.start()
    live = live_job.built()
    live.fill_with_noise(seed=7)
    for optimizer in live.optimizers:
        optimizer._copy_main_params_to_model_params()
    scheduler = training.get_optimizer_param_scheduler(live.optimizer)
    arguments.iteration, arguments.consumed_train_samples = 4, 4 * arguments.global_batch_size
    training.save_checkpoint(4, live.model, live.optimizer, scheduler, 0)


if __name__ == "__main__":
    main()
