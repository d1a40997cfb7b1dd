"""A test's AWS: moto's server, and what a system that must end its paid hosts needs beyond it.

Each module holds one thing that moto leaves out: `clock` (time that the tests set), `machines` (client tokens, CpuOptions,
states that take time or hang), `attributes` (protections, and what else is edited), `schedules` (one-time schedules that
fire), `iam` (calls are checked against our policies), `faults`, `pricing`, `metrics`. `wire` knows the protocols, `app` puts
a call through all of them, `control` is the tests' side.
"""

ACCOUNT = "123456789012"
