"""The package against values worked by hand. Needs the library (EPMOE_LIBRARY) and EPMOE_SOURCE_DIR; what needs NumPy is
skipped, and counted, without it."""

import array
import ctypes
import gc
import math
import os
import pathlib
import subprocess
import sys
import unittest

import epmoe
from epmoe import _abi

try:
    import numpy
except ImportError:
    numpy = None

SOURCE = pathlib.Path(os.environ["EPMOE_SOURCE_DIR"])
needs_numpy = unittest.skipUnless(numpy, "NumPy is not installed")


def tensor(values, kind, *shape):
    """A tensor of the buffer protocol's memory."""
    flat = epmoe.as_tensor(array.array(kind, values))
    return epmoe.Tensor(shape, flat.dtype, flat.device, flat.pointer, flat)


class Interface(unittest.TestCase):
    def test_generated_file_is_current(self):
        made = subprocess.run([sys.executable, SOURCE / "python/make_abi.py", SOURCE / "include/epmoe/epmoe.h"],
                              capture_output=True, text=True, check=True).stdout
        self.assertEqual(made, (SOURCE / "python/epmoe/_abi.py").read_text(),
                         "run: python3 python/make_abi.py include/epmoe/epmoe.h > python/epmoe/_abi.py")

    def test_layouts_and_constants_are_those_of_c(self):
        struct, structs, symbols = None, 0, 0
        for line in (SOURCE / "tests/abi/epmoe.abi").read_text().splitlines():
            words = line.split()
            if line.startswith("struct"):
                struct = getattr(_abi, words[1])
                self.assertEqual(ctypes.sizeof(struct), int(words[2]), words[1])
                structs += 1
            elif line.startswith("    "):
                field = getattr(struct, words[0])
                self.assertEqual((field.offset, field.size), (int(words[1]), int(words[2])), f"{struct} {words[0]}")
            elif line.startswith("constant") and words[1] != "EPMOE_STATUS_FORCE_INT32":
                self.assertEqual(getattr(_abi, words[1]), int(words[2]), words[1])
            elif line.startswith("symbol"):
                self.assertIn(words[1], _abi.FUNCTIONS)
                symbols += 1
        self.assertGreater(structs, 30)
        self.assertEqual(symbols, len(_abi.FUNCTIONS))


class Refused(unittest.TestCase):
    """What C could not tell from something else."""

    def test_integers_beyond_32_bits(self):
        ids = tensor([0, 1, 2, 3], "i", 4, 1)
        for call in (lambda: epmoe.align(ids, 4, 2**32 + 1), lambda: epmoe.align(ids, 2**32 + 4),
                     lambda: epmoe.expert_range(2**32 + 8, 2, 1), lambda: epmoe.config(hidden=2**32 + 64),
                     lambda: epmoe.topk(tensor([1, 2], "f", 1, 2), 2, n_group=2**32 + 1)):
            with self.assertRaisesRegex(ValueError, "is 42949[0-9]*: expected 32 bits"):
                call()
        with self.assertRaisesRegex(TypeError, "num_tokens is 2.0: expected an integer"):
            epmoe.run("silu_and_mul", num_tokens=2.0)
        with self.assertRaisesRegex(TypeError, "scale is 'x': expected a number"):
            epmoe.topk(tensor([1, 2], "f", 1, 2), 2, scale="x")
        with self.assertRaisesRegex(ValueError, "k is -40: expected at least 1"):
            epmoe.topk(tensor([1, 2], "f", 1, 2), -40)
        with self.assertRaisesRegex(ValueError, "block_size 0: expected at least 1"):
            epmoe.align(ids, 4, 0)

    def test_arguments_are_named(self):
        with self.assertRaisesRegex(TypeError, "logits: "):
            epmoe.topk(None, 2)
        with self.assertRaisesRegex(TypeError, "buffer has format 'b'"):
            epmoe.as_tensor(array.array("b", [-1]))

    def test_strides_that_are_no_elements(self):
        memory = array.array("f", [0] * 32)

        class Packed:
            __array_interface__ = {"shape": (2, 4), "typestr": "<f4", "data": (memory.buffer_info()[0], False),
                                   "strides": (19, 4), "version": 3}
        with self.assertRaisesRegex(ValueError, "whole elements of 4"):
            epmoe.as_tensor(Packed())

    def test_weights_of_other_shapes(self):
        config = epmoe.config(hidden=64, intermediate=32, num_experts=4, top_k=2, dtype="float32", max_tokens=4)
        with epmoe.Comm("cpu") as comm:
            layer = epmoe.Layer(config, comm)
            good = {"router": epmoe.empty((4, 64), "float32"), "gate_up": epmoe.empty((4, 64, 64), "float32"),
                    "down": epmoe.empty((4, 64, 32), "float32")}
            for name, bad in (("router", epmoe.empty((64, 4), "float32")), ("gate_up", epmoe.empty((1, 1, 1), "float32")),
                              ("gate_up", epmoe.empty((4, 64, 64), "bfloat16")), ("down", epmoe.empty((4, 32, 64), "float32"))):
                with self.assertRaisesRegex(ValueError, f"{name} is .*expected shape"):
                    layer.set_weights(**{**good, name: bad})
            layer.close()
        with self.assertRaisesRegex(ValueError, "the Comm is closed"):
            epmoe.Layer(config, comm)
        with self.assertRaisesRegex(ValueError, "the Layer is closed"):
            layer.set_random_weights()

    def test_fp8_on_the_wire(self):
        # With 448 in the row its scale is 1: numbers that E4M3 has stay what they are, 17 becomes 16.
        outputs = []
        for wire in ("float32", "float8_e4m3"):
            config = epmoe.config(hidden=64, intermediate=32, num_experts=4, top_k=2, dtype="float32", max_tokens=4,
                                  wire_dtype=wire)
            with epmoe.Comm("cpu") as comm, epmoe.Layer(config, comm) as layer:
                layer.set_random_weights()
                outputs.append([layer.forward(tensor([448] + [value] * 63, "f", 1, 64)).tolist() for value in (16, 17)])
        self.assertEqual(outputs[0][0], outputs[1][0])
        self.assertNotEqual(outputs[0][1], outputs[1][1])

    def test_placement(self):
        # 12 becomes two copies; with 6, 4 and 2 they make 10 and 14, since two ranks of 5 have 3 and 2.
        load = tensor([12, 6, 4, 2], "q", 4)
        placement = epmoe.placement_plan(load, 5, 2)
        self.assertEqual(placement.tolist(), [0, 1, 3, 0, 2])
        with self.assertRaisesRegex(epmoe.Error, "num_physical is 3: expected 4"):
            epmoe.placement_plan(load, 3, 2)
        config = epmoe.config(hidden=64, intermediate=32, num_experts=4, top_k=2, dtype="float32", max_tokens=4)
        x, outputs, counted = tensor([math.sin(i) for i in range(256)], "f", 4, 64), [], tensor([0, 0, 7, 0], "q", 4)
        ids = epmoe.empty((4, 2), "int32")
        with epmoe.Comm("cpu") as comm:
            for placed in (None, placement):
                with epmoe.Layer(config, comm, placement=placed) as layer:
                    layer.set_random_weights()
                    outputs.append(sum(layer.forward(x, expert_load=counted, ids_out=ids).tolist(), []))
                    with self.assertRaisesRegex(ValueError, "expert_load is .*expected shape"):
                        layer.forward(x, expert_load=tensor([0] * 5, "q", 5))
            with self.assertRaisesRegex(epmoe.Error, r"placement\[2\] is 4: expected an expert, 0..3"):
                epmoe.Layer(config, comm, placement=tensor([0, 1, 4, 2, 3], "i", 5))
        self.assertLess(math.dist(*outputs), 1e-5 * math.hypot(*outputs[0]))
        chosen = sum(ids.tolist(), [])
        self.assertEqual(counted.tolist(), [2 * chosen.count(e) + 7 * (e == 2) for e in range(4)])

    def test_bias_of_experts(self):
        x, ids, weights = tensor([1, 2], "f", 1, 2), tensor([0], "i", 1, 1), tensor([1], "f", 1, 1)
        w13, w2 = tensor([1] * 8, "f", 1, 4, 2), tensor([1] * 4, "f", 1, 2, 2)
        with self.assertRaisesRegex(ValueError, "b13 is .*expected shape"):
            epmoe.experts(x, ids, weights, w13, w2, b13=tensor([1], "f", 1, 1))


class Ops(unittest.TestCase):
    def test_topk_by_hand(self):
        # Probabilities 0.1 .. 0.4; the best two are 3 and 2, renormalised to 4/7 and 3/7.
        logits = tensor([math.log(p) for p in (1, 2, 3, 4)], "f", 1, 4)
        ids, weights = epmoe.topk(logits, 2, renormalize=True)
        self.assertEqual(ids.tolist(), [[3, 2]])
        self.assertAlmostEqual(weights.tolist()[0][0], 4 / 7, places=6)
        self.assertAlmostEqual(weights.tolist()[0][1], 3 / 7, places=6)
        # A bias chooses and never weighs: sigmoid(0) = 1/2 whatever the bias is.
        ids, weights = epmoe.topk(tensor([0, 0, 0, 0], "f", 1, 4), 1, scoring="sigmoid",
                                  selection_bias=tensor([0, 0, 5, 0], "f", 4), scale=3)
        self.assertEqual((ids.tolist(), weights.tolist()), ([[2]], [[1.5]]))

    def test_align_by_hand(self):
        # Slots 1 and 2 go to expert 0, slot 0 to expert 2; blocks of 2, padding is slot 4.
        sorted_ids, expert_ids, padded = epmoe.align(tensor([2, 0, 0, -1], "i", 2, 2), 3, 2)
        self.assertEqual(padded.tolist(), [4])
        self.assertEqual(sorted_ids.tolist()[:4], [1, 2, 0, 4])
        self.assertEqual(expert_ids.tolist()[:2], [0, 2])
        self.assertTrue(all(value == 4 for value in sorted_ids.tolist()[4:]))

    def test_experts_by_hand(self):
        # d = 2, f = 1: h = silu(20) * x0 (to fp32), y = (e + 1) * (x0, 0).
        w13 = tensor([20, 0, 1, 0] * 2, "f", 2, 2, 2)
        w2 = tensor([1 / 20, 0, 2 / 20, 0], "f", 2, 2, 1)
        x = tensor([1, 7, 1, -3], "f", 2, 2)
        y = epmoe.experts(x, tensor([0, 1, 1, -1], "i", 2, 2), tensor([0.5, 0.25, 2, 9], "f", 2, 2), w13, w2)
        for got, expected in zip(sum(y.tolist(), []), [1.0, 0, 4.0, 0]):
            self.assertAlmostEqual(got, expected, places=5)

    def test_run_any_op_into_the_callers_memory(self):
        out = array.array("f", [math.nan] * 2)
        epmoe.run("silu_and_mul", num_tokens=1, width=2, dtype="float32", x=tensor([0, 20, 5, 3], "f", 1, 4), y=out)
        self.assertEqual(out[0], 0)
        self.assertAlmostEqual(out[1], 60, places=4)

    def test_errors_name_what_is_wrong(self):
        with self.assertRaisesRegex(epmoe.Error, "top_k is 5") as caught:
            epmoe.topk(tensor([0, 1, 2, 3], "f", 1, 4), 5)
        self.assertEqual(caught.exception.status, epmoe.STATUS["ERROR_INVALID_ARGUMENT"])
        with self.assertRaisesRegex(ValueError, "there is no op 'topj'"):
            epmoe.run("topj")
        with self.assertRaisesRegex(TypeError, "no field 'width_'.*width"):
            epmoe.run("silu_and_mul", width_=1)
        with self.assertRaisesRegex(ValueError, "scoring is 'soft': expected one of softmax"):
            epmoe.topk(tensor([0, 1], "f", 1, 2), 1, scoring="soft")
        with self.assertRaisesRegex(ValueError, "two dimensions"):
            epmoe.topk(tensor([0, 1], "f", 2), 1)
        with self.assertRaisesRegex(ValueError, r"out\[1\] is .*expected shape \(1, 1\), float32"):
            epmoe.topk(tensor([0, 1], "f", 1, 2), 1, out=(None, tensor([0], "i", 1, 1)))
        with self.assertRaisesRegex(ValueError, "w2 is .*expected shape"):
            epmoe.experts(tensor([1, 2], "f", 1, 2), tensor([0], "i", 1, 1), tensor([1], "f", 1, 1),
                          tensor([0] * 4, "f", 1, 2, 2), tensor([0] * 3, "f", 1, 3, 1))


class Exchange(unittest.TestCase):
    """Tensors of others in, and own ones out."""

    def test_dlpack_between_own_tensors(self):
        source = tensor([1, 2, 3, 4, 5, 6], "i", 2, 3)
        copy = epmoe.tensor._from_dlpack(source, None)
        self.assertEqual((copy.shape, copy.dtype, copy.device), ((2, 3), "int32", "cpu"))
        self.assertEqual(copy.pointer, source.pointer)
        self.assertEqual(copy.tolist(), [[1, 2, 3], [4, 5, 6]])
        self.assertEqual(len(epmoe.tensor._exported), 1)
        del copy
        gc.collect()
        self.assertEqual(len(epmoe.tensor._exported), 0)

    def test_a_capsule_that_nobody_takes_is_freed(self):
        source = epmoe.empty((3,), "bfloat16")
        capsule = source.__dlpack__()
        self.assertEqual(len(epmoe.tensor._exported), 1)
        del capsule
        gc.collect()
        self.assertEqual(len(epmoe.tensor._exported), 0)

    def test_a_capsule_is_taken_once(self):
        class Twice:
            capsule = epmoe.empty((3,), "float32").__dlpack__()

            def __dlpack__(self, stream=None):
                return self.capsule

            def __dlpack_device__(self):
                return 1, 0
        kept = epmoe.as_tensor(Twice())
        with self.assertRaisesRegex(TypeError, "dltensor"):
            epmoe.as_tensor(Twice())
        self.assertEqual(kept.shape, (3,))

    def test_all_dtypes_survive_dlpack(self):
        for dtype in ("float32", "float16", "bfloat16", "float8_e4m3", "float8_e8m0", "uint8", "int32", "int64"):
            back = epmoe.tensor._from_dlpack(epmoe.empty((2, 3), dtype), None)
            self.assertEqual((back.shape, back.dtype), ((2, 3), dtype))

    def test_cuda_array_interface_and_mixed_devices(self):
        class OnDevice:
            __cuda_array_interface__ = {"shape": (1, 4), "typestr": "<f4", "data": (4096, False), "version": 3}

        taken = epmoe.as_tensor(OnDevice())
        self.assertEqual((taken.device, taken.pointer, taken.shape), ("cuda", 4096, (1, 4)))
        given = taken.__cuda_array_interface__
        self.assertEqual((given["data"], given["typestr"], given["shape"]), ((4096, False), "<f4", (1, 4)))
        with self.assertRaisesRegex(AttributeError, "on the CPU"):
            epmoe.empty((1,), "float32").__cuda_array_interface__
        with self.assertRaisesRegex(ValueError, "on the CPU and on CUDA"):
            epmoe.run("silu_and_mul", num_tokens=1, width=2, dtype="float32", x=OnDevice(),
                      y=epmoe.empty((1, 2), "float32"))

    def test_buffers(self):
        self.assertEqual(epmoe.as_tensor(b"\1\2").tolist(), [1, 2])
        self.assertEqual(epmoe.as_tensor(array.array("q", [7])).dtype, "int64")
        with self.assertRaisesRegex(TypeError, "format 'd'"):
            epmoe.as_tensor(array.array("d", [1]))
        with self.assertRaisesRegex(ValueError, "side by side"):
            epmoe.as_tensor(memoryview(array.array("f", [1, 2, 3, 4]))[::2])
        with self.assertRaisesRegex(TypeError, "dtype is float64"):
            epmoe.empty((1,), "float64")
        self.assertEqual(epmoe.empty((0, 4), "float32").tolist(), [])

    def test_bfloat16_list(self):
        one = epmoe.empty((2,), "bfloat16")
        ctypes.memmove(one.pointer, b"\x80\x3f\x20\xc0", 4)
        self.assertEqual(one.tolist(), [1.0, -2.5])

    @needs_numpy
    def test_numpy_in_and_out_without_a_copy(self):
        logits = numpy.log(numpy.array([[1, 2, 3, 4]], numpy.float32))
        ids = numpy.zeros((1, 2), numpy.int32)
        back, weights = epmoe.topk(logits, 2, renormalize=True, out=(ids, None))
        self.assertIs(back, ids)
        self.assertEqual(ids.tolist(), [[3, 2]])
        seen = numpy.from_dlpack(weights)
        numpy.testing.assert_allclose(seen, [[4 / 7, 3 / 7]], rtol=1e-6)
        self.assertEqual(seen.ctypes.data, weights.pointer)
        del weights
        gc.collect()
        numpy.testing.assert_allclose(seen, [[4 / 7, 3 / 7]], rtol=1e-6)  # it keeps the memory alive
        self.assertEqual(numpy.asarray(epmoe.as_tensor(ids)).ctypes.data, ids.ctypes.data)

    @needs_numpy
    def test_numpy_lives_as_long_as_its_tensor(self):
        array_ = numpy.arange(4, dtype=numpy.float32)
        before = sys.getrefcount(array_)
        taken = epmoe.as_tensor(array_)
        self.assertGreater(sys.getrefcount(array_), before)
        del taken
        gc.collect()
        self.assertEqual(sys.getrefcount(array_), before)

    @needs_numpy
    def test_numpy_read_only_and_strided(self):
        logits = numpy.zeros((2, 4), numpy.float32)
        logits.flags.writeable = False
        self.assertEqual(epmoe.topk(logits, 1)[0].tolist(), [[0], [0]])
        ids = numpy.zeros((2, 1), numpy.int32)
        ids.flags.writeable = False
        with self.assertRaisesRegex(ValueError, r"out\[0\] is read-only"):
            epmoe.topk(logits, 1, out=(ids, None))
        with self.assertRaisesRegex(ValueError, "strides"):
            epmoe.topk(numpy.zeros((4, 2), numpy.float32).T, 1)
        with self.assertRaisesRegex(TypeError, "dtype code 2 with 64 bits"):
            epmoe.topk(numpy.zeros((2, 4)), 1)
        # A stride of a dimension of one element says nothing.
        self.assertEqual(epmoe.topk(numpy.zeros((4, 1), numpy.float32).T, 1)[0].tolist(), [[0]])


class Layers(unittest.TestCase):
    def setUp(self):
        self.comm = epmoe.Comm("cpu")

    def test_presets(self):
        config = epmoe.preset("mixtral-8x7b", max_tokens=3)
        self.assertEqual((config.hidden, config.num_experts, config.top_k, config.max_tokens), (4096, 8, 2, 3))
        self.assertIn("deepseek-v3", epmoe.presets())
        with self.assertRaisesRegex(epmoe.Error, "mixtral-8x7b"):
            epmoe.preset("mixtral")
        self.assertEqual([epmoe.expert_range(5, 3, rank) for rank in range(3)], [(0, 2), (2, 2), (4, 1)])

    def test_forward_is_the_ops_in_a_row(self):
        config = epmoe.config(hidden=8, intermediate=4, num_experts=4, top_k=2, renormalize=1, dtype="float32",
                              max_tokens=3)
        values = [math.sin(i) for i in range(4 * 8 * 8)]
        router, w13 = tensor(values[:32], "f", 4, 8), tensor(values, "f", 4, 8, 8)
        w2, x = tensor(values[:128], "f", 4, 8, 4), tensor([math.cos(i) for i in range(24)], "f", 3, 8)
        ids, logits = epmoe.empty((3, 2), "int32"), epmoe.empty((3, 4), "float32")
        with epmoe.Layer(config, self.comm) as layer:
            with self.assertRaisesRegex(epmoe.Error, "weights"):
                layer.forward(x)
            layer.set_weights(router=router, gate_up=w13, down=w2)
            y = layer.forward(x, ids_out=ids, logits_out=logits).tolist()
            with self.assertRaisesRegex(ValueError, r"x is .*expected shape \(3, 8\), float32"):
                layer.forward(tensor([0] * 24, "i", 3, 8))
            with self.assertRaisesRegex(ValueError, "residual is"):
                layer.forward(x, residual=tensor([0] * 8, "f", 1, 8))
        chosen, weights = epmoe.topk(logits, 2, renormalize=True)
        self.assertEqual(chosen.tolist(), ids.tolist())
        expected = epmoe.experts(x, chosen, weights, w13, w2).tolist()
        for row, expected_row in zip(y, expected):
            for got, value in zip(row, expected_row):
                self.assertAlmostEqual(got, value, places=5)

    def test_checkpoint(self):
        with epmoe.Checkpoint(SOURCE / "tests/data/golden/mixtral") as checkpoint:
            self.assertEqual((checkpoint.family, checkpoint.hidden), ("mixtral", 64))
            config = checkpoint.layer_config(0, dtype="float32", max_tokens=2)
            with epmoe.Layer(config, self.comm) as layer:
                layer.load(checkpoint, 0)
                y = layer.forward(tensor([0.5] * 2 * 64, "f", 2, 64))
                first, second = y.tolist()
                self.assertEqual(first, second)  # equal tokens, equal bits
                self.assertTrue(any(first) and all(map(math.isfinite, first)))
        with self.assertRaisesRegex(epmoe.Error, "config.json"):
            epmoe.Checkpoint("/nonexistent")

    def test_bad_communicator(self):
        with self.assertRaisesRegex(ValueError, "backend is 'gpu'"):
            epmoe.Comm("gpu")
        with self.assertRaisesRegex(ValueError, "transport is 'ib'"):
            epmoe.Comm("cpu", "ib")
        self.assertEqual((self.comm.rank, self.comm.size, self.comm.transport), (0, 1, "local"))


if __name__ == "__main__":
    if not numpy:
        print("NumPy is not installed: its tests are skipped")
    unittest.main(verbosity=2)
