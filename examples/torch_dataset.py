"""Graded groups in a PyTorch DataLoader: read in its worker, acknowledged by the training loop.

python examples/torch_dataset.py my-trainer
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tugline.errors import UsageError
from tugline.stream import GradedGroup, GroupStream


class GroupDataset(IterableDataset[GradedGroup]):
    """The groups of a `GroupStream`, opened in the worker with these options."""

    def __init__(self, consumer: str, **options: Any) -> None:
        self.consumer, self.options = consumer, options

    def __iter__(self) -> Iterator[GradedGroup]:
        """Yield groups. Raises `UsageError` with several workers, as each would get all groups."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            msg = f"num_workers is {worker.num_workers}, must be 0 or 1"
            raise UsageError(msg)
        with GroupStream(self.consumer, **self.options) as stream:
            yield from stream


def main() -> None:
    """Consume all groups that are available now."""
    consumer = sys.argv[1]
    dataset = GroupDataset(consumer, follow=False)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=1, prefetch_factor=1, multiprocessing_context="spawn"
    )
    with GroupStream(consumer) as stream:
        for group in loader:
            print(group.id, *(f"{sample.session}={sample.reward:g}" for sample in group.samples))
            # train on it and save a checkpoint here
            stream.acknowledge(group)


if __name__ == "__main__":
    main()
