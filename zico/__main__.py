"""``python -m zico``: the same as the ``zico`` command."""

import sys

from zico.cli import main

if __name__ == "__main__":
    sys.exit(main())
