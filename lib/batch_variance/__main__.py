"""``python -m batch_variance`` is the command ``batch-variance``."""

from .cli import main

if __name__ == "__main__":
    main()
