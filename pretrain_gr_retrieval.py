"""Trains an HSTU retrieval model from a gin file.

    torchrun --nproc_per_node 1 pretrain_gr_retrieval.py --gin-config-file movielens_retrieval.gin

Flags: --gin-binding "Class.field = value" (repeatable), --validate-only, --evaluate CHECKPOINT,
--resume latest|CHECKPOINT. A plain `python` start runs as one process.
"""

from configs.cli import parse_arguments


def main() -> None:
    """Reads the settings, then runs them."""
    experiment, command = parse_arguments("retrieval")
    if command.validate_only:
        return
    # Imported late: a setting that is refused should not wait for torch.
    from training.run import run

    run(experiment, evaluate=command.evaluate)


if __name__ == "__main__":
    main()
