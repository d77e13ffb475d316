"""The script that a launcher starts, once a rank: trains the experiment of a YAML file.

python driver.py -c configs/digits.yaml train.epochs=3 optimizer.lr=0.05
python -m torch.distributed.launch --nproc_per_node=2 driver.py -c configs/digits.yaml
"""

import sys

from harness.__main__ import command

if __name__ == "__main__":
    command(["train", *sys.argv[1:]])
