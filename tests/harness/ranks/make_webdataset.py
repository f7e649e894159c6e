"""Make a webdataset of numbers for Energon: `make_webdataset.py FOLDER SAMPLES SHARDS`."""

import sys
from pathlib import Path

import webdataset
import yaml
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

folder, samples, shards = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
(folder / ".nv-meta").mkdir(parents=True)
with webdataset.ShardWriter(str(folder / "shard_%02d.tar"), maxcount=samples // shards, verbose=0) as writer:
    for number in range(samples):
        writer.write({"__key__": f"{number:05d}", "txt": f"{number}"})
names = [f"shard_{number:02d}.tar" for number in range(shards)]
WebdatasetPreparator.prepare_dataset(folder, names, split_parts_ratio=[("train", 1.0)], workers=1)
sample = {"__module__": "megatron.energon", "__class__": "TextSample"}
(folder / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump({"sample_type": sample, "field_map": {"text": "txt"}}))
