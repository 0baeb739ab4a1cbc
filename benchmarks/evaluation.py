"""The published evaluation, simulated, beside the published figures. Writes docs/evaluation.md."""

from __future__ import annotations

import common
from paper.page import MODULES, write_page


def main() -> None:
    """Simulate, write results, and write the page from those that are in results/."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", choices=MODULES, action="append", help="only this experiment; may be repeated")
    parser.add_argument("--page", action="store_true", help="simulate nothing: write the page from results/")
    options = parser.parse_args()
    directory = common.output_directory(options)
    for name in [] if options.page else options.only or MODULES:
        result = MODULES[name].run(smoke=options.smoke)
        common.write(result, MODULES[name].text_of(result), directory)
    if options.page or directory == common.RESULTS:
        write_page()


if __name__ == "__main__":
    main()
