"""Metadata of ms_accum."""
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
INIT = (HERE / "ms_accum" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "(.+)"$', INIT, re.MULTILINE)[1]
# With the newest mkdocstrings for Python 3.10 (1.0.6), pymdown-extensions 12 fails.
DOCS = ["mkdocs-material", "mkdocs-jupyter", "mkdocstrings[python]", "pymdown-extensions<12; python_version < '3.11'"]

setup(
    name="ms_accum",
    version=VERSION,
    description="Exact gradient accumulation for MindSpore, with one buffer for each parameter",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["ms_accum", "ms_accum.*"]),
    package_data={"ms_accum": ["py.typed"]},
    python_requires=">=3.10,<3.13",
    # MindSpore's wheels are compiled against NumPy 1 and crash with NumPy 2.
    install_requires=["mindspore>=2.7", "numpy<2", "download", "safetensors>=0.8"],
    extras_require={
        "plot": ["matplotlib"],
        "docs": DOCS,
        # MindYOLO's wheel names no requirements. MindOCR pins old ones: pip install --no-deps mindocr
        "ecosystem": ["mindcv", "mindone", "mindyolo", "opencv-python-headless", "pycocotools", "setuptools<81"],
        "tutorials": ["ipykernel", "matplotlib", "mindcv", "nbclient"],
        "test": [*DOCS, "mindcv", "pytest", "pytest-xdist", "hypothesis", "matplotlib", "nbclient", "nbformat",
                 "ipykernel", "ruff", "mypy"],
        "bench": ["torch", "jax", "jaxlib", "optax", "mindcv", "matplotlib"],
    },
    entry_points={"console_scripts": ["ms-accum = ms_accum.__main__:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
