"""Puts the wheel's Triton where NVIDIA's image has it, and drops what only its Python client needs."""

import shutil
from pathlib import Path

import pytriton

wheel = Path(pytriton.__file__).parent / "tritonserver"
target = Path("/opt/tritonserver")
stub = next((wheel / "python_backend_stubs").glob("3.11/triton_python_backend_stub"))
shutil.copytree(wheel / "backends", target / "backends", dirs_exist_ok=True, symlinks=True)
shutil.copy2(stub, target / "backends" / "python" / stub.name)
shutil.copytree(wheel / "caches", target / "caches", symlinks=True)
shutil.copytree(wheel / "bin", target / "server", symlinks=True)
for extra in ("lib", "external_libs"):
    if (wheel / extra).is_dir():
        shutil.copytree(wheel / extra, target / extra, symlinks=True)
shutil.rmtree(wheel)
(target / "bin" / "tritonserver").chmod(0o755)
