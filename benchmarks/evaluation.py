"""The published evaluation, simulated, beside the published figures. Writes docs/evaluation.md."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import common
from paper.check import rows
from paper.page import MODULES, write_page

if TYPE_CHECKING:
    from pathlib import Path


def main() -> None:
    """Simulate, write results, and write the page from those that are in results/."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", choices=MODULES, action="append", help="only this experiment; may be repeated")
    parser.add_argument("--page", action="store_true", help="simulate nothing: write the page from results/")
    parser.add_argument("--check", action="store_true", help="simulate a few rows, and compare them with the results")
    options = parser.parse_args()
    if options.check:
        sys.exit(check(options.output or common.RESULTS))
    directory = common.output_directory(options)
    for name in [] if options.page else options.only or MODULES:
        result = MODULES[name].run(smoke=options.smoke)
        common.write(result, MODULES[name].text_of(result), directory)
    if options.page or directory == common.RESULTS:
        write_page()


def check(directory: Path) -> int:
    """Return 1 if a row of the results is another one today, and print which."""
    found = [(name, kept == fresh) for name, kept, fresh in rows(directory)]
    differ = [name for name, is_same in found if not is_same]
    if differ:
        print(f"{len(differ)} of {len(found)} rows are older than the code; `make evaluation` simulates all anew:")
        print("\n".join(differ))
        return 1
    print(f"all of {len(found)} rows are what today's code makes of them")
    return 0


if __name__ == "__main__":
    main()
