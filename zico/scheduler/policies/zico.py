"""The best way for the jobs that are there: a best schedule, or shift or claims, whichever gets them further.

See ``docs/design/scheduling.md`` for the reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.scheduler.packed import Compiled
from zico.scheduler.plan import decide
from zico.scheduler.plan_search import plan

if TYPE_CHECKING:
    from zico.scheduler.state import CompiledPolicy

POLICY: CompiledPolicy = Compiled("zico", decide, plan=plan)
