"""The audit: what each sampled objective's gradient is worth, before anyone trains with it.

    python -m rlsim.audit                      # minutes on one core; the last line is the picture's path
    python -m rlsim.audit --updates 200 --prompts 100 --claim-rows 65536   # narrower intervals
    python -m rlsim.audit --policy outputs/rlsim/RUN/checkpoints/best --teachers weak

An objective claims to optimise something: the expected reward, a KL to the teacher. For each of them (`entries.py`) its
trainer runs with a learning rate of zero, so that every update is another draw of the same gradient, and these are
compared with the gradient of what is claimed (`claims.py`):

- *exactly* on one-digit problems, where all answers can be listed: "sampling" returns every answer, weighted by its
  chance (`enumerated.py`), so one update is the expected gradient;
- *by samples* on the real task, with intervals (`measure.py`): the direction of the mean, the direction of one update,
  the answers needed until the signal equals the noise, and the cost of an update.

`report.py` writes table, picture and JSON. docs/objectives.md quotes them.
"""
