"""Tells setuptools that `conf/` at the root of the source tree is the folder `ray_diloco/conf` of a wheel.

Everything else stands in pyproject.toml, which has no word for "the packages that you find, and these from over there".
"""

from setuptools import find_namespace_packages, find_packages, setup

setup(
    packages=[
        *find_packages(include=["ray_diloco", "ray_diloco.*"]),
        "ray_diloco.conf",
        *(f"ray_diloco.conf.{group}" for group in find_namespace_packages("conf")),
    ],
    package_dir={"ray_diloco.conf": "conf"},
    package_data={"": ["*.yaml"]},
)
