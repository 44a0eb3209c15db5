"""Metadata and packages. `patches/` is next to the package in the checkout, and is installed inside it.

In a checkout the link mindspeed_chunk/patches points to it, for a Python that is started in its root.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PATCHES = "mindspeed_chunk.patches"

# Read as text: importing the package here would need its requirements.
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "mindspeed_chunk" / "__init__.py").read_text(), re.M)

setup(
    name="mindspeed_chunk",
    version=VERSION,
    description="Chunk MoE for MindSpeed-MM: expert-parallel all-to-all that runs while experts compute",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=[
        # without the target of the link, which would be included twice
        *find_packages(include=["mindspeed_chunk", "mindspeed_chunk.*"], exclude=[PATCHES, f"{PATCHES}.*"]),
        PATCHES,
        *(f"{PATCHES}.{name}" for name in find_packages("patches")),
    ],
    py_modules=["mindspeed_chunk_autoload"],
    package_dir={PATCHES: "patches"},
    package_data={"mindspeed_chunk": ["py.typed"], PATCHES: ["README.md"]},
    install_requires=[
        "torch>=2.7.1,<2.14",
        "pyyaml",
        "packaging",
        "rich",
    ],
    entry_points={
        "console_scripts": ["mindspeed-chunk = mindspeed_chunk.tools.__main__:main"],
        # torch calls these at the end of `import torch`
        "torch.backends": ["mindspeed_chunk = mindspeed_chunk_autoload:autoload"],
    },
    extras_require={
        "standalone": ["transformers>=5.24,<5.25", "safetensors", "numpy"],
        "tools": ["matplotlib"],
        "npu": ["torch_npu>=2.7.1,<2.14"],
        "test": [
            "pytest>=8",
            "pytest-cov",
            "pytest-xdist>=3.7",
            "hypothesis",
            "pydantic>=2",
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<2.5",
            "types-PyYAML",
        ],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
