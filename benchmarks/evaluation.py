"""The published evaluation, simulated, beside the published figures; and what it left open. Writes docs/evaluation.md."""

from __future__ import annotations

from typing import Any

import common
from paper import budget, identical, many, pairs, tables

EXPERIMENTS = {module.NAME.removeprefix("paper-"): module for module in (identical, pairs, budget, tables, many)}


def main() -> None:
    """Simulate, write results, and write the page from them."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    directory = common.output_directory(options)
    for name in options.only or EXPERIMENTS:
        result: dict[str, Any] = EXPERIMENTS[name].run(smoke=options.smoke)
        common.write(result, EXPERIMENTS[name].text_of(result), directory)


if __name__ == "__main__":
    main()
