"""What one layer call costs an NPU, counted from its operations: where each of them runs, and what it moves.

KERNELS is what the sources of the operators say for A2 and A3. An operation that is not in it is an error: look up
where it runs, and add it. Fused operations of torch_npu run on AiCore.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The repositories, with the commits that were read. The host code of a kernel has a list of the dtypes that its version
# for AiCore takes. With any other dtype, the version for the AI CPU is launched.
SOURCES = {
    "ops-math": ("hicann/ops-math", "c41933244c31e44fd496e3bb3212164f8c48c214"),
    "ops-nn": ("hicann/ops-nn", "e5c3fa9327ea95ba26d06227e746923580d10921"),
}

_REAL = frozenset({torch.float32, torch.float16, torch.bfloat16})
_INTS = frozenset({torch.int32, torch.int64})
_ANY = frozenset({*_REAL, *_INTS, torch.int8, torch.uint8, torch.bool})


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Where operations run.

    Attributes:
        ops: their names in aten; an operation in place has the name of the other.
        dtypes: with these, the operation runs on AiCore.
        decides: whose dtype that is: the "result", the first "operand", or the "widest" of all operands.
        source: repository and path of the list.
    """

    ops: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    decides: str
    source: str

    def deciding(self, operands: list[torch.Tensor], results: list[torch.Tensor]) -> torch.dtype:
        if self.decides == "widest":
            return functools.reduce(torch.promote_types, (each.dtype for each in operands))
        return (results if self.decides == "result" else operands)[0].dtype


KERNELS = (
    Kernel(("cumsum",), _REAL | {torch.int32}, "result", "ops-math/math/cumsum/op_api/cumsum.cpp"),
    Kernel(("sort",), _REAL, "operand", "ops-math/math/sort/op_api/sort.cpp"),
    Kernel(("searchsorted",), frozenset(), "operand", "ops-math/math/search_sorted/op_api/searchsorted.cpp"),
    Kernel(
        ("masked_fill",),
        _REAL | {torch.int32, torch.int8, torch.bool},
        "operand",
        "ops-math/conversion/masked_fill/op_api/masked_fill.cpp",
    ),
    Kernel(
        ("floor_divide", "div"),
        _REAL | {torch.int32, torch.int8, torch.uint8},
        "result",
        "ops-math/math/floor_div/op_api/floordiv.cpp",
    ),
    Kernel(
        ("scatter", "scatter_add"),
        _REAL | {torch.int32, torch.int8, torch.uint8},
        "operand",
        "ops-nn/index/scatter_elements_v2/op_api/scatter_elements.cpp",
    ),
    Kernel(
        ("histc",),
        _INTS | {torch.float32, torch.float16},
        "operand",
        "ops-math/math/histogram_v2/op_api/histogram.cpp",
    ),
    Kernel(
        ("repeat_interleave",), _REAL | _INTS, "operand", "ops-nn/index/repeat_interleave/op_api/repeat_interleave.cpp"
    ),
    Kernel(("index_select",), _ANY, "operand", "ops-nn/index/gather_v2/op_api/gather_v2.cpp"),
    Kernel(("gather",), _REAL | _INTS, "operand", "ops-nn/index/gather_elements/op_api/gather_elements.cpp"),
    Kernel(("add", "sub"), _ANY, "result", "ops-math/math/{add,sub}/op_api/{add,sub}.cpp"),
    Kernel(("mul",), _ANY, "result", "ops-math/math/mul/op_api/mul.cpp"),
    Kernel(("neg",), _REAL | _INTS, "result", "ops-math/math/neg/op_api/neg.cpp"),
    Kernel(("maximum",), _REAL | _INTS, "result", "ops-math/math/maximum/op_api/maximum.cpp"),
    Kernel(("sum",), _REAL | _INTS, "result", "ops-math/math/reduce_sum/op_api/reduce_sum_op.cpp"),
    Kernel(
        ("clamp", "clamp_min", "clamp_max"),
        _REAL | _INTS,
        "operand",
        "ops-math/conversion/clip_by_value_v2/op_api/clip_by_value.cpp",
    ),
    Kernel(("eq", "ne"), _ANY, "widest", "ops-math/math/{equal,not_equal}/op_api"),
    Kernel(("lt", "gt", "ge"), _REAL | _INTS, "widest", "ops-math/math/{less,greater,greater_equal}/op_api"),
    Kernel(("any", "all"), frozenset({torch.bool}), "operand", "ops-math/math/reduce_{any,all}/op_api"),
    Kernel(
        ("logical_and", "bitwise_and", "bitwise_not"),
        frozenset({torch.bool}),
        "operand",
        "ops-math/math/logical_{and,not}/op_api",
    ),
    Kernel(("where",), _REAL | _INTS, "result", "ops-math/math/select/op_api/select.cpp"),
    Kernel(("arange",), _REAL | _INTS, "result", "ops-math/math/range/op_api/arange.cpp"),
    Kernel(("cat", "stack"), _ANY, "result", "ops-math/conversion/concat_d/op_api/concat_d.cpp"),
    Kernel(
        ("zeros", "zeros_like", "new_zeros", "zero", "fill", "ones", "new_ones", "full", "new_full", "scalar_tensor"),
        _ANY,
        "result",
        "ops-math/{math/zero_op,conversion/fill}/op_api",
    ),
    Kernel(("clone", "copy", "_to_copy"), _ANY, "result", "ops-math/{math/cast,conversion/view_copy}/op_api"),
    Kernel(("mm", "addmm"), _REAL, "result", "ops-nn/matmul"),
)
BY_OP = {name: kernel for kernel in KERNELS for name in kernel.ops}
# A scatter into one dimension handles one element after the other, and every core reads all indices.
SCATTERS = ("scatter", "scatter_add", "index_put", "_index_put_impl", "index_add")
_MATMULS = ("mm", "addmm", "npu_grouped_matmul", "npu_grouped_matmul_add")
# These copy from and to any strides.
_COPIES = ("clone", "copy", "_to_copy")
# These make a tensor without a kernel.
_NO_KERNEL = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
    "alias",
    "promote_types",
)

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_MADE_OF_OTHERS = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")


class Costs(TorchDispatchMode):
    """Counts what runs while it is active, except on tensors of the host.

    Args:
        rows: T x K, the rows of the call; one pass moves this many.
        hidden: H. A tensor `[n, W]` with W >= H has rows; moving it is as many passes as H fits in W.
        host: what `no_host_sync` yields.

    Attributes:
        ops: how often each operation ran, by its name in aten; one in place has the name of the other.
        times: when each operation ran, `time.perf_counter()`.
        on_ai_cpu: how often each operation and dtype ran on the AI CPU.
        not_in_the_wheel: operations for which torch_npu has no kernel, in none of their forms: they run on the host.
        scattered: elements of each scatter into one dimension.
    """

    def __init__(self, rows: int, hidden: int, host) -> None:
        super().__init__()
        self._rows, self._hidden, self._host = rows, hidden, host
        self.ops: Counter[str] = Counter()
        self.times: list[float] = []
        self.on_ai_cpu: Counter[str] = Counter()
        self.not_in_the_wheel: set[str] = set()
        self.scattered: list[int] = []
        self._moved = 0
        self._strided: Counter[tuple] = Counter()
        self._alive: list[torch.Tensor] = []  # so that no address and no id is used twice
        self._repeated: set[int] = set()

    @property
    def passes(self) -> float:
        """Over all rows, without matmuls.

        Rows with strides are one more, unless a copy reads them: the host code of any other operation makes a
        contiguous copy first.
        """
        return round(self._moved / self._rows, 1)

    @property
    def strided_reads(self) -> int:
        """How often the same rows with strides were read, at most. Each time, they are copied."""
        return max(self._strided.values(), default=0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operands = _tensors((args, kwargs))
        ours = self._host.has(operands[0]) if operands else self._host.makes
        result = func(*args, **kwargs)
        space, name = func._schema.name.split("::")
        name = name.removesuffix("_")
        if not ours and space in ("aten", "npu") and not func.is_view and name not in _NO_KERNEL:
            self._count(name, operands, _tensors(result), written=_written(func, args, kwargs))
            # a CPU repeats elements with another form of the operation than the one that was called
            form = func.name().replace("repeat_interleave.Tensor", "repeat_interleave.self_Tensor")
            keys = ("PrivateUse1",) if name == "repeat_interleave" else ("PrivateUse1", *_MADE_OF_OTHERS)
            if not any(_has_kernel(form, key) for key in keys):
                self.not_in_the_wheel.add(form)
        return result

    def _count(self, name, operands, results, written) -> None:
        if name == "repeat_interleave":
            self._repeated.add(id(results[0]))
            self._alive += results
        elif name == "index_select" and id(operands[1]) in self._repeated:
            return  # a CPU repeats elements by their indices; an NPU has one kernel for both
        self.ops[name] += 1
        self.times.append(time.perf_counter())
        if not name.startswith("npu_"):
            self._place(name, operands, results)
        if name in SCATTERS and operands[0].dim() == 1:
            self.scattered.append(operands[1].numel())
        if name not in _MATMULS:
            self._move(name, operands, results, written)

    def _place(self, name, operands, results) -> None:
        if name not in BY_OP:
            raise AssertionError(f"{name} of {[each.dtype for each in operands]}: not in KERNELS; where does it run?")
        dtype = BY_OP[name].deciding(operands, results)
        # a sort of one element has no version for AiCore
        if dtype not in BY_OP[name].dtypes or (name == "sort" and operands[0].shape[-1] == 1):
            self.on_ai_cpu[f"{name} of {str(dtype).removeprefix('torch.')}"] += 1

    def _move(self, name, operands, results, written) -> None:
        passes = [self._passes(each) for each in (*operands, *results)]
        self._moved += max(passes, default=0)
        for each in operands:
            if self._passes(each) and not each.is_contiguous() and id(each) not in written:
                place = (each.untyped_storage()._cdata, each.storage_offset(), each.shape, each.stride(), each._version)
                self._strided[place] += 1
                self._alive.append(each)
                self._moved += 0 if name in _COPIES else self._passes(each)

    def _passes(self, tensor: torch.Tensor) -> int:
        return len(tensor) * (tensor.shape[1] // self._hidden) if tensor.dim() == 2 else 0


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func, args, kwargs) -> set[int]:
    """The ids of the tensors that an operation writes to."""
    arguments = func._schema.arguments
    named = {argument.name: value for argument, value in zip(arguments, args)} | kwargs
    names = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return {id(leaf) for name in names for leaf in _tensors(named.get(name))}
