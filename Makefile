# Two commands set everything up: `make demo` and `make test`. Nothing outside this folder is
# touched, except that `make test` as root installs the Debian packages that tests use (see below).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help demo dist test test-all test-mosaic test-beside test-unit test-slurm test-wheel test-newest test-oldest test-titan check format unit bench zoo gpu gpu-wheels house docs reference pictures system-packages clean

help:
	@echo "make demo    install into $(VENV), then train through a kill and a notice and prove it"
	@echo "make test    install with the test extras, then run every test"
	@echo "make test-all  the same with all examples, seeds and costly cases, drawn anew (hours)"
	@echo "make test-mosaic  Mosaic's streaming, in an environment of its own (8 GB)"
	@echo "make test-newest  the same tests but the longest with today's torch, in an environment of its own (8 GB)"
	@echo "make test-oldest  and with torch 2.11, the oldest that is meant"
	@echo "make test-titan  torchtitan's own trainer, killed and drained, with today's torch (a minute; 400 MB more)"
	@echo "make dist    the sdist and the wheel, in dist/"
	@echo "make test-wheel  the wheel in clean environments of each Python and torch: demo and types (6 GB at a time)"
	@echo "make check   format, lint, types, import rules, unit tests (two minutes)"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make docs    the site of the documents, in site/ (a minute); a warning is an error"
	@echo "make reference  write docs/reference/ from the source (a second)"
	@echo "make pictures   draw the documents' pictures anew (minutes)"
	@echo "make house   count what a reader of the source must hold in mind (a second)"
	@echo "make bench   the side-by-side measurements in benchmarks/ (hours)"
	@echo "make zoo     other people's optimizers and models, killed and resumed (ten minutes); docs/zoo.md"
	@echo "make gpu     what wants a GPU: tests, a kill, a hang, 10 GB beside DCP (nine minutes, no network)"
	@echo "make gpu-wheels  what make gpu needs besides torch, to be brought to a machine without a network"
	@echo "make clean   remove $(VENV) and what tools left behind"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "outlast needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv; } || \
	  { echo "Python's venv module is missing. Try: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first, by its exact version: a looser request would pull gigabytes of CUDA packages.
$(VENV)/.torch: $(VENV)/bin/python constraints.txt
	$(PIP) install -q -c constraints.txt setuptools torch==2.13.0
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test,dev]'
	$(PIP) install -q -c constraints.txt --no-deps axe-playwright-python  # for axe-core alone
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/outlast demo $(DEMO_ARGS)

# What a test needs from Debian is installed where that is possible; elsewhere the test says so
# and is skipped. CI runs as root, so that nothing is skipped there. Slurm is for containers alone:
# where systemd runs, it would start Slurm's services, and tests start their own. Behind the virtual
# environment, which may need apt as well, and beside what pip installs there.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
NETWORK_PACKAGES := iproute2 nftables
system-packages: | $(VENV)/bin/python
	@PATH="$$PATH:/usr/sbin:/sbin"; wanted=; \
	has() { for one; do command -v $$one >/dev/null || return 1; done; }; \
	has_network() { has ip nft; }; has_browser() { has chromium || has google-chrome; }; \
	has_slurm() { has munged slurmctld slurmd srun; }; \
	has_network || wanted="$$wanted $(NETWORK_PACKAGES)"; \
	has strace || wanted="$$wanted strace"; \
	has prometheus promtool || wanted="$$wanted prometheus"; \
	has_browser || wanted="$$wanted chromium"; \
	has_slurm || [ -d /run/systemd/system ] || wanted="$$wanted $(SLURM_PACKAGES)"; \
	if [ "$$wanted" ] && [ "$$(id -u)" = 0 ] && has apt-get; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $$wanted; fi; \
	has_network || echo "ip or nft is not here and not installed: tests with several machines will be skipped"; \
	has strace || echo "strace is not here and not installed: its tests will be skipped"; \
	has prometheus promtool || echo "prometheus is not here and not installed: its tests will be skipped"; \
	has_browser || echo "Chromium is not here and not installed: its tests will be skipped"; \
	has_slurm || echo "Slurm is not here and not installed: its tests will be skipped"

# Tests run side by side, but those that are marked "alone": they are judged by what is saved within
# milliseconds, or look at the whole machine. Those of Slurm mostly wait for its clock, and have all
# of the other tests' time for that; what they say comes behind it. Real processes wait for each
# other half of their time, so there are more of these tests at once than cores. Of those that run
# real processes, and of the unit tests that have threads and sockets, up to five that failed are run
# once more, alone. PYTEST_ARGS may choose tests that not all have. What pytest has compiled is kept,
# even where Python was told to keep nothing: each process would compile all of it again.
TEST_PROCESSES ?= 2
REAL_PROCESSES ?= 4
REAL := $(BIN)/python tests/second_chance.py
UNIT_TESTS := tests/unit -n $(TEST_PROCESSES) --dist loadfile
UNIT := $(BIN)/python -m pytest $(UNIT_TESTS)
CHOSEN := $(if $(strip $(PYTEST_ARGS)),|| [ $$? -eq 5 ])
test test-all test-beside test-unit test-slurm unit check: export PYTHONDONTWRITEBYTECODE =
test:
	+$(MAKE) --no-print-directory -j 2 $(VENV)/.installed-test system-packages
	+$(MAKE) --no-print-directory -j 2 test-beside test-slurm
	$(REAL) tests/real -m alone -n 0 $(PYTEST_ARGS) $(CHOSEN)

test-all: export OUTLAST_TEST_ALL = 1
test-all: $(VENV)/.installed-more
	+$(MAKE) --no-print-directory test
	+$(MAKE) --no-print-directory test-wheel

# Other people's loaders and trackers are tested with all examples alone: pyarrow has 150 MB, W&B 60.
$(VENV)/.installed-more: $(VENV)/.installed-test
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[loaders,trackers]'
	@touch $@

# WHEEL_ARGS chooses: --python 3.12 --torch 2.13.0 --find-links PLACE
dist: $(VENV)/.installed-test
	$(BIN)/python tools/wheels.py --build

test-wheel: $(VENV)/.installed-test
	$(BIN)/python tools/wheels.py $(WHEEL_ARGS)

test-beside: test-unit
	$(REAL) tests/real -m "not alone" --ignore tests/real/slurm -n $(REAL_PROCESSES) --dist worksteal $(PYTEST_ARGS) $(CHOSEN)

test-unit:
	$(REAL) $(UNIT_TESTS) $(PYTEST_ARGS) $(CHOSEN)

test-slurm:
	@{ $(REAL) tests/real/slurm -n 0 $(PYTEST_ARGS) $(CHOSEN); } >$(VENV)/slurm.txt 2>&1; \
	  code=$$?; cat $(VENV)/slurm.txt; exit $$code

# With other torches than the one that has a wheel for CPUs alone: theirs bring CUDA's libraries, and
# 6 GB are installed. The newest is part of CI; the oldest (test-oldest) is for a person.
NEWEST := .venv-newest
OLDEST := .venv-oldest
NEWEST_TESTS ?= tests/unit tests/real/inprocess
$(NEWEST)/.installed: TORCH := torch==2.15.0
$(OLDEST)/.installed: TORCH := torch==2.11.0
$(NEWEST)/.installed $(OLDEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(@D)/constraints.txt
	echo "$(TORCH)" >> $(@D)/constraints.txt
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-input -c $(@D)/constraints.txt \
	  'setuptools<82' $(TORCH)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-input -c $(@D)/constraints.txt \
	  --no-build-isolation -e '.[test]'
	@touch $@

test-newest: $(NEWEST)/.installed
test-oldest: $(OLDEST)/.installed
test-newest test-oldest:
	$(<D)/bin/python tests/second_chance.py $(NEWEST_TESTS) -n $(TEST_PROCESSES) --dist loadfile

# Mosaic's streaming asks for other versions than the rest, and for torchvision, which brings CUDA's
# libraries (8 GB); for a person.
MOSAIC := .venv-mosaic
$(MOSAIC)/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-input 'setuptools<82' torch==2.15.0 \
	  mosaicml-streaming==0.13.0 torchdata pytest pytest-timeout hypothesis lifelines simpy obstore
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-input --no-build-isolation -e .
	@touch $@

test-mosaic: $(MOSAIC)/.installed
	OUTLAST_TEST_ALL=1 $(<D)/bin/python -m pytest tests/real/data/test_data_borrowed.py -k mosaic

# torchtitan wants today's torch and other versions of Hugging Face's libraries than Transformers: its
# environment lies on that of test-newest (400 MB more).
TITAN := .venv-titan
$(TITAN)/.installed: $(NEWEST)/.installed
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -c 'import sysconfig; from pathlib import Path; \
	  beneath = Path("$(NEWEST)/lib").resolve().glob("python*/site-packages"); \
	  Path(sysconfig.get_path("purelib"), "beneath.pth").write_text( \
	    f"import site; site.addsitedir({str(next(beneath))!r})")'
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-input torchtitan==0.3.0
	@touch $@

test-titan: $(TITAN)/.installed
	$(<D)/bin/python tests/second_chance.py tests/real/integrations/test_torchtitan.py -n $(TEST_PROCESSES)

unit: $(VENV)/.installed-test
	$(UNIT) -q

check: $(VENV)/.installed-test
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy --no-error-summary
	PYTHONPATH=src $(BIN)/lint-imports --no-logo
	$(UNIT) -q

# The site's tool stands alone: it needs none of what Outlast needs.
DOCS := .venv-docs
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-input -c constraints.txt zensical
	@touch $@

docs: $(DOCS)/.installed
	$(DOCS)/bin/zensical build --clean --strict

reference: $(VENV)/.installed
	$(BIN)/python tools/reference.py

pictures: $(VENV)/.installed-test
	$(BIN)/python benchmarks/demo_picture.py --picture docs/demo.svg
	$(BIN)/python benchmarks/learning_curves.py --picture docs/same-bits.svg
	$(BIN)/python tools/page_pictures.py

house:
	@$(PYTHON) tools/house.py $(HOUSE_ARGS)

format: $(VENV)/.installed-test
	$(BIN)/ruff format -q .
	$(BIN)/ruff check -q --fix .

# About four hours on a machine that does nothing else; each of them can be run alone. Other libraries
# are installed into PEERS, each beside the same torch.
PEERS ?= .venv-peers
BENCHMARKS := limits session_overhead metrics_cost inprocess_overhead notice_cost save_cost save_burden save_scale saving saving_fsdp2 restoring object_store recovery replication same_bits hangs saving_gpu plan_start simulate_scale
bench: $(VENV)/.installed-test
	@for name in $(BENCHMARKS); do \
	  echo "== $$name"; \
	  case $$name in saving|recovery) more="--peers-dir $(PEERS)";; *) more="";; esac; \
	  $(BIN)/python benchmarks/$$name.py $$more || exit 1; \
	done

# Optimizers and models that nobody here wrote, in an environment of their own. timm and torchao come
# without what they depend on: torchvision has no build for every torch, and is not called.
ZOO := .venv-zoo
ZOO_PIP := $(ZOO)/bin/python -m pip --disable-pip-version-check --no-input
ZOO_LIST := benchmarks/zoo/constraints.txt
$(ZOO)/.installed: pyproject.toml $(ZOO_LIST)
	$(PYTHON) -m venv $(ZOO)
	$(ZOO_PIP) install -q -c $(ZOO_LIST) setuptools torch==2.13.0
	$(ZOO_PIP) install -q -c $(ZOO_LIST) --no-build-isolation -e .
	$(ZOO_PIP) install -q -c $(ZOO_LIST) pytorch-optimizer transformers einops pillow
	$(ZOO_PIP) install -q -c $(ZOO_LIST) --no-deps timm torchao
	@touch $@

zoo: $(ZOO)/.installed
	$(ZOO)/bin/python benchmarks/zoo --write docs/zoo.md $(ZOO_ARGS)

# For a machine that has torch with CUDA, and perhaps no network: what is missing beside it comes from
# wheels that were fetched elsewhere and brought along. It is put into a folder of its own and not
# into a virtual environment: one that is made from a virtual environment does not see its torch.
# Where python3 has no torch, the environment of make test is used, if there is one.
GPU := $(CURDIR)/.venv-gpu
WHEELS := .gpu-wheels
WHEELS_FOR ?= 3.11 3.12 3.13
WHEELS_TAGS := 2_28 2_27 2_17 2_12 2014 2010
GPU_PYTHON = $(shell { ! $(PYTHON) -c 'import torch' && [ -x $(BIN)/python ]; } 2>/dev/null && \
  echo $(BIN)/python || echo $(PYTHON))
GPU_RUN = PYTHONPATH="$(GPU):$$PYTHONPATH" $(GPU_PYTHON) benchmarks/gpu.py
gpu:
	@missing="$$($(GPU_RUN) --missing)"; [ -z "$$missing" ] || [ ! -d $(WHEELS) ] || \
	  $(GPU_PYTHON) -m pip install -q --disable-pip-version-check --no-index --no-deps --upgrade \
	    --find-links $(WHEELS) --target $(GPU) $$missing || true
	@$(GPU_RUN) $(GPU_ARGS)

gpu-wheels:
	@for version in $(WHEELS_FOR); do \
	  $(PYTHON) -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
	    -c constraints.txt -d $(WHEELS) --implementation cp --python-version $$version \
	    --abi cp$$(echo $$version | tr -d .) --abi abi3 --abi none --platform any \
	    $(foreach tag,$(WHEELS_TAGS),--platform manylinux$(if $(findstring _,$(tag)),_)$(tag)_x86_64) \
	    $$($(PYTHON) benchmarks/gpu.py --needed) || exit 1; \
	done
	@du -sh $(WHEELS)

clean:
	rm -rf $(ZOO) $(MOSAIC) $(DOCS) site .cache $(TITAN) $(NEWEST) $(OLDEST) $(VENV) $(GPU) $(WHEELS) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
