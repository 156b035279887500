"""The scheduler process: queues, KV blocks, batches and stops; owns every request's truth.

`core.py` is the heart, a state machine without I/O, and these files are its parts: `config`
`request` `registry` `queues` `admission` `fence` `seats` `placement` `policy` `planner` `frames`
`pipeline` `intake` `outbox` `statistics` `invariants`. Everything else is the shell around it.
"""
