"""The laboratory: what measures, compares, re-enacts others and plans offline.

* Planners, policies and simulators of published systems, the bounds and judges that they are held to.
* The commands ``zico plan`` and ``zico simulate``.
* ``zico fit --save``: what traced jobs could do with less.

Nothing in the runtime (``zico``, its adapters and kernels) imports it, but by the names that users
give: ``zico.base.laboratory``.
"""
