"""Takes model.onnx and the labels out of a magika wheel: unpack.py WHEEL_FOLDER OUT."""

import array
import json
import sys
import zipfile
from pathlib import Path

wheels, out = Path(sys.argv[1]), Path(sys.argv[2])
with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
    models = sorted(name for name in wheel.namelist() if name.endswith("/model.onnx") and "standard" in name)
    if not models:
        raise SystemExit("the magika wheel holds no models/standard_*/model.onnx; pin a version that does")
    folder = models[-1].rsplit("/", 1)[0]
    (out / "1").mkdir(parents=True)
    (out / "1" / "model.onnx").write_bytes(wheel.read(models[-1]))
    config = json.loads(wheel.read(f"{folder}/config.min.json"))
    (out / "labels.txt").write_text("\n".join(config["target_labels_space"]) + "\n")
    (out / "config.min.json").write_text(json.dumps(config, indent=1) + "\n")
# A warm-up request of the kind that clients send, in the raw form that Triton reads: 2048 numbers of four bytes.
script = b"#!/usr/bin/env python3\nprint('hello')\n"
(out / "warmup").mkdir()
(out / "warmup" / "script").write_bytes(array.array("i", [*script, *[256] * (2048 - len(script))]).tobytes())
for path in [out, *out.rglob("*")]:
    path.chmod(0o755 if path.is_dir() else 0o644)
