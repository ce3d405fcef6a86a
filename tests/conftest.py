"""What must hold before jax starts: eight devices, no network, compilations kept between runs."""

import getpass
import os
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import jax

CACHE = Path(tempfile.gettempdir()) / f"agon_jax-tests-{getpass.getuser()}" / jax.__version__

jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_compilation_cache_max_size", 2**30)  # bounded, and so locked: runs may share
