import inspect

import pytest

from ray_diloco.outer import bin_mean_kernels, codebook_kernels, e3m0_kernels, scale_kernels, sparse_kernels

FAMILIES = (scale_kernels, e3m0_kernels, bin_mean_kernels, codebook_kernels, sparse_kernels)


def compiled_functions(module):
    return {name: one.py_func for name, one in vars(module).items() if hasattr(one, "py_func")}


def test_functions_that_two_families_of_kernels_need_are_the_same_in_both():
    sources = {}
    for module in FAMILIES:
        for name, function in compiled_functions(module).items():
            sources.setdefault(name, set()).add(inspect.getsource(function))
    assert {name: len(found) for name, found in sources.items() if len(found) > 1} == {}


@pytest.mark.parametrize("module", FAMILIES, ids=lambda module: module.__name__)
def test_a_kernel_calls_compiled_functions_of_its_own_file_only(module):
    # numba's cache on disk would not notice that a function of another file has changed.
    files = {inspect.getsourcefile(function) for function in compiled_functions(module).values()}
    assert files == {module.__file__}
