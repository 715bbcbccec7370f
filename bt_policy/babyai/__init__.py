"""BabyAI (minigrid) as frames, target names and behaviour codes, with the environment's own expert.

python -m bt_policy.babyai outputs/data/babyai 2000        # expert rows: train.jsonl, valid.jsonl and frames/
"""

from bt_policy.babyai.expert import Decision, ensure, expert, expert_rows, save_frame, write_rows
from bt_policy.babyai.room import CHUNK, HELD_OUT, LEVELS, ROOM_6, ROOM_8, STAY, Room

__all__ = [
    "CHUNK", "HELD_OUT", "LEVELS", "ROOM_6", "ROOM_8", "STAY", "Decision", "Room", "ensure", "expert", "expert_rows",
    "save_frame", "write_rows",
]  # fmt: skip
