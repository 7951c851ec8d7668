"""The reader of machine code reads what cuobjdump prints, and the rules find what they forbid."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest

from . import kernel_rules, machine_code
from .kernel_rules import Rule
from .machine_code import Kernel, Listing

# Of a module with two kernels, as cuobjdump 13.0 prints them; shortened.
GATHER = "_ZN9async_emb4cuda12isa_baseline11gather_rowsIjEEvPKT_PS2_"
UPDATE = "_ZN9async_emb4cuda38_GLOBAL__N__a8c7d3b8_6_toy_cu_cd48949c13update_kernelEPKfPffl"

USAGE = f"""
Fatbin ptx code:
================
arch = sm_90
code version = [9,0]
compressed
ptxasOptions =  --fmad false --generate-line-info

Fatbin elf code:
================
arch = sm_90
code version = [1,8]
host = linux

Resource usage:
 Common:
  GLOBAL:29 CONSTANT[4]:232
 Function {GATHER}:
  REG:28 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {UPDATE}:
  REG:19 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

SASS = f"""
Fatbin elf code:
================
arch = sm_90
code version = [1,8]

	code for sm_90
		Function : {GATHER}
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                                 /* 0x00000a00ff017b82 */
                                                                                          /* 0x000fe20000000800 */
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;              /* 0x0000000402047981 */
        /*0020*/              @!P0 LDG.E.EF.128 R8, desc[UR4][R2.64] ;                    /* 0x0000000402047981 */
        /*0030*/                   LDG.E R9, desc[UR4][R2.64] ;                           /* 0x0000000402047981 */
        /*0040*/               @P0 STG.E.128 desc[UR4][R6.64], R4 ;                       /* 0x0000000406007986 */
		Function : {UPDATE}
        /*0000*/                   STL.64 [R1], R4 ;                                      /* 0x00000a00ff017b82 */
        /*0010*/              @UP0 UIADD3 UR4, UR4, 0x1, URZ ;                            /* 0x00000a00ff017b82 */
        /*0020*/                   LDL R4, [R1+0x8] ;                                     /* 0x00000a00ff017b82 */
       /*10030*/                   FFMA.RZ R3, R4, R5, R6 ;                               /* 0x0000000304057223 */
"""

PTX = f"""
Fatbin ptx code:
================
arch = sm_90
compressed
ptxasOptions =  --fmad false --generate-line-info

.version 9.0
.target sm_90
.visible .entry {GATHER}(
.param .u64 {GATHER}_param_0
)
{{
.reg .pred %p<2>;
.loc	34 13 0
// an fma.rn.f32 in a comment
ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1];
@!%p1 bra $L__BB5_2;
$L__BB5_2:
ret;
}}
.entry {UPDATE}(
.param .f32 {UPDATE}_param_2
)
{{
@%p1 mul.rn.f32 	%f4, %f3, %f1;
{{ add.rn.f32 %f5, %f4, %f2; sqrt.rn.f32 %f6, %f5; }}
	div.rn.f32 	%f7, %f1, %f6;
}}

Fatbin elf code:
================
arch = sm_90
"""

needs_cxxfilt = pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt, which comes with g++")


def test_resources_are_read():
    usage = machine_code.parse_usage(USAGE)
    assert usage.keys() == {("sm_90", GATHER), ("sm_90", UPDATE)}
    assert (usage["sm_90", GATHER]["REG"], usage["sm_90", GATHER]["STACK"]) == (28, 0)
    assert (usage["sm_90", UPDATE]["STACK"], usage["sm_90", UPDATE]["LOCAL"]) == (16, 8)


def test_instructions_of_sass_are_counted_with_and_without_predicates():
    sass = machine_code.parse_sass(SASS)
    assert sass["sm_90", GATHER] == Counter(
        {"LDC": 1, "LDG.E.128.CONSTANT": 1, "LDG.E.EF.128": 1, "LDG.E": 1, "STG.E.128": 1}
    )
    assert sass["sm_90", UPDATE] == Counter({"STL.64": 1, "UIADD3": 1, "LDL": 1, "FFMA.RZ": 1})


def test_instructions_of_ptx_are_counted_but_not_comments():
    ptx, options = machine_code.parse_ptx(PTX)
    assert ptx["sm_90", GATHER] == Counter({"ld.global.v4.u32": 1, "bra": 1, "ret": 1})
    assert ptx["sm_90", UPDATE] == Counter({"mul.rn.f32": 1, "add.rn.f32": 1, "sqrt.rn.f32": 1, "div.rn.f32": 1})
    assert options == ["--fmad false --generate-line-info"]


@needs_cxxfilt
def test_the_three_lists_come_together():
    gather, update = machine_code.parse(USAGE, SASS, PTX).kernels
    assert (gather.name, gather.architecture, gather.registers) == ("gather_rows<unsigned int>", "sm_90", 28)
    assert (gather.wide_loads, gather.wide_stores, gather.local_accesses, gather.fused) == (2, 1, 0, 0)
    assert (update.name, update.wide_loads, update.local_accesses, update.fused) == ("update_kernel", 0, 2, 1)


@needs_cxxfilt
def test_output_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="not what is read here"):
        machine_code.parse(USAGE, SASS.replace("Function :", "Fun :"), PTX)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void async_emb::cuda::isa_baseline::gather<float, (int)4>(float const*, long)", "gather<float, (int)4>"),
        (
            "void async_emb::cuda::(anonymous namespace)::run<async_emb::cuda::Update<async_emb::core::Half, 8> >()",
            "run<Update<Half, 8> >",
        ),
        ("void cub::detail::EmptyKernel<void>()", "cub::detail::EmptyKernel<void>"),
    ],
)
def test_names_are_shortened(name, short):
    assert machine_code.short_name(name) == short


# ---- rules

RULES = (Rule("lookup", "Gather<", registers=32, wide="<16>"), Rule("update", "Update<", registers=64))


def gather(**changes: object) -> Kernel:
    kernel = Kernel("run<Gather<16> >", "sm_90", registers=28, ptx=Counter({"ld.global.v4.u32": 1}))
    kernel.sass = Counter({"LDG.E.128": 4, "STG.E.128": 4})
    return changed(kernel, changes)


def update(**changes: object) -> Kernel:
    kernel = Kernel("run<Update<float> >", "sm_90", registers=40, ptx=Counter({"mul.rn.f32": 1, "div.rn.f32": 1}))
    kernel.sass = Counter({"LDG.E": 4, "STG.E": 4, "FFMA": 9, "FMUL": 1})
    return changed(kernel, changes)


def changed(kernel: Kernel, changes: dict[str, object]) -> Kernel:
    for name, value in changes.items():
        assert hasattr(kernel, name)
        setattr(kernel, name, value)
    return kernel


def problems(*kernels: Kernel, options: str = "--fmad false") -> list[str]:
    return kernel_rules.problems(Listing(list(kernels), [options]), ["sm_90"], RULES)


def test_good_kernels_have_no_problem():
    assert problems(gather(), update()) == []


def test_an_architecture_may_have_a_bound_of_its_own():
    rules = (Rule("lookup", "Gather<", registers=32, wide="<16>", registers_on_10=40),)
    for architecture, registers, wanted in (
        ("sm_90", 33, ["33 registers, more than 32"]),
        ("sm_100", 40, []),
        ("sm_100", 41, ["41 registers, more than 40"]),
    ):
        kernel = gather(architecture=architecture, registers=registers)
        listing = Listing([kernel], ["--fmad false"])
        found = kernel_rules.problems(listing, [architecture], rules)
        assert [problem.rpartition(": ")[2] for problem in found] == wanted


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"registers": 33}, "33 registers, more than 32"),
        ({"stack": 8}, "8 bytes of local memory, 0 accesses to it"),
        ({"local": 8}, "8 bytes of local memory"),
        ({"shared": 64}, "64 bytes of shared memory, more than 0"),
        ({"sass": Counter({"LDG.E.128": 1, "STG.E.128": 1, "LDL": 2})}, "2 accesses"),
        ({"sass": Counter({"LDG.E.64": 1, "STG.E.128": 1})}, "no 16-byte load from global memory"),
        ({"sass": Counter({"LDG.E.128": 1, "STG.E": 1})}, "no 16-byte store to global memory"),
        (
            {"sass": Counter({"LDG.E.128": 1, "STG.E.128": 1, "FFMA": 2})},
            "2 fused multiply-adds in SASS, but no division",
        ),
        ({"ptx": None}, "no PTX is embedded"),
        ({"name": "run<Other>"}, "has no rule"),
    ],
)
def test_a_broken_rule_is_named(changes, problem):
    found = problems(gather(**changes), gather(), update())
    assert len(found) == 1
    assert found[0].startswith("sm_90 run<")
    assert problem in found[0]


@pytest.mark.parametrize(
    "opcode",
    [
        "fma.rn.f32",
        "fma.rn.bf16x2",
        "fma.rn.f64",
        "mad.rn.f32",
        "add.f32",
        "mul.f32",
        "sub.f16x2",
        "add.rz.f32",
        "div.approx.f32",
        "div.full.f32",
        "sqrt.approx.ftz.f32",
        "ex2.approx.f32",
        "rsqrt.approx.f32",
        "mul.rn.ftz.f32",
        "atom.global.add.f32",
        "red.global.add.f32",
        "red.relaxed.gpu.global.add.f32",
    ],
)
def test_arithmetic_that_breaks_the_promise_is_named(opcode):
    (found,) = problems(gather(), update(ptx=Counter({"div.rn.f32": 1, opcode: 3})))
    assert f"{opcode} (3 times)" in found


@pytest.mark.parametrize(
    "opcode",
    ["mul.rn.f32", "add.rn.f64", "mad.lo.s32", "mul.wide.u32", "add.s64", "neg.f32", "cvt.rzi.s32.f32", "atom.add.u64"],
)
def test_other_arithmetic_is_fine(opcode):
    assert problems(gather(), update(ptx=Counter({"div.rn.f32": 1, opcode: 3}))) == []


def test_any_local_memory_is_named():
    found = problems(gather(stack=8, sass=Counter({"LDL": 1, "STL": 1})), update())
    assert any("8 bytes of local memory, 2 accesses to it" in problem for problem in found)


def test_an_assembler_that_may_contract_is_named():
    assert problems(gather(), update(), options="") == ["ptxas was called without --fmad false, but with ''"]


def test_kernels_of_libraries_are_not_judged():
    assert problems(gather(), update(), gather(name="cub::Sort<int>", stack=8)) == []


def test_a_rule_without_a_kernel_is_named():
    assert problems(gather()) == ["no kernel is of the kind 'update': correct RULES"]
    assert problems(gather(name="run<Gather<8> >"), update()) == [
        "no kernel of the kind 'lookup' matches '<16>': correct RULES"
    ]


def test_an_architecture_without_kernels_is_named():
    listing = Listing([gather(), update()], [])
    (found,) = kernel_rules.problems(listing, ["sm_90", "sm_80"], RULES)
    assert found.startswith("sm_80: 2 kernels are missing")


def test_a_module_without_kernels_is_no_good_module():
    assert "the module has no kernels of ours" in kernel_rules.problems(Listing([], []), ["sm_90"], RULES)


def test_a_function_that_is_called_is_named():
    listing = Listing([gather(), update()], [], ["helper"])
    assert kernel_rules.problems(listing, ["sm_90"], RULES) == [
        "helper: is called rather than inlined, so no kernel shows its arithmetic"
    ]


def test_the_table_shows_extremes():
    text = kernel_rules.table(Listing([gather(), gather(registers=30), update()], []), RULES)
    (line,) = (line for line in text.splitlines() if line.startswith("lookup"))
    assert line.split() == ["lookup", "sm_90", "2", "30", "<=", "32", "0", "0", "0", "4", "4", "0"]
