# Everything runs in .venv; `make setup` makes it. The targets work on a fresh Debian machine.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOT_SOURCES := $(shell find src -name '*.py')
SECONDS ?= 60
ROUNDS ?= 20
PROCESSES ?= 2
SEEDS ?= 5000
STALLS ?= 200
# gcc's level of optimization. -Og compiles in half the time of -O2, so `make test` in a new clone takes
# it. What measures speed compiles again with -O2, which users have. Other targets take what is there.
LEVEL_THERE := $(patsubst build/level-%,%,$(firstword $(wildcard build/level-*)))
COMPILE_LEVEL ?= $(or $(LEVEL_THERE),2)
# Containers set it, and hundreds of processes that the tests start would each compile their source.
unexport PYTHONDONTWRITEBYTECODE
# More than the cores: tests of real processes mostly wait. Three runs share them.
WORKERS ?= 3
INTERPRETED_WORKERS ?= 2
# Each has a Java of its own, which uses all cores.
SPARK_WORKERS ?= 1
# Each test runs in one form. Compiled, as users run it, is the default: processes, clients of other
# makers, models, the modules of setup.py. Interpreted run these folders, of packages that are not
# compiled; they share the machine with the compiler.
INTERPRETED_FOLDERS := api bench cli client config deploy examples federation lab node/groups node/ownership \
  node/raft node/reads node/relocation lake security support tools
# These, too: of parts that are not compiled, or tests that replace a part of a compiled class.
INTERPRETED_FILES := model/test_*planted* model/test_cluster_retention* model/test_cluster_stopped_partition* \
  model/test_cluster_wider* model/test_copied* model/test_controller* model/test_federation* model/test_lake_reads* model/test_lease* \
  model/test_paper* model/test_pubqueue* model/test_raft* model/test_remote* \
  model/test_sessions_shared* \
  unit/io/disk/test_raft_files.py unit/log/test_pushdown.py unit/node/connections/test_client_notes.py \
  unit/node/failure/test_dispensable.py unit/node/failure/test_doubt.py unit/node/feeds/test_feeds.py unit/node/feeds/test_given_up.py unit/node/feeds/test_late_filters.py \
  unit/node/lease/test_lease.py unit/node/metadata/test_metadata.py unit/node/metadata/test_store.py \
  unit/node/placement/test_controller.py unit/node/placement/test_ring.py \
  unit/node/publish/test_admission.py unit/node/publish/test_admission_verdicts.py \
  unit/node/publish/test_applier.py unit/node/publish/test_forwarding.py \
  unit/node/publish/test_leader_sync.py \
  unit/node/publish/test_publishing.py unit/node/publish/test_refusals.py \
  unit/node/routing/test_peer_filters.py unit/node/state/test_image_transfer.py \
  unit/node/state/test_record_contents.py unit/node/state/test_session_takeover.py \
  unit/node/test_frame_bounds.py unit/node/test_images.py unit/node/test_position_reports.py \
  unit/node/test_refusals.py unit/node/test_refusals_older.py unit/test_documents.py \
  unit/test_imports.py unit/test_limits_documented.py unit/test_paid_records.py unit/test_rights_gate.py \
  unit/test_security_document.py unit/test_sqlite.py unit/test_testing.py unit/test_trust.py \
  unit/test_waits.py
# These of the folders run compiled.
COMPILED_FILES := \
  unit/api/test_audit_index.py unit/api/test_changes_in_flight.py unit/api/test_cluster_history.py \
  unit/api/test_session_history.py unit/client/log/test_client.py \
  unit/client/pubqueue/test_older_store_files.py unit/examples/test_home_assistant.py \
  unit/examples/test_sparkplug.py unit/examples/test_started.py \
  unit/federation/sidecar/test_broker_federation.py unit/federation/sidecar/test_edge_broker_groups.py \
  unit/federation/sidecar/test_edge_broker_interest.py unit/federation/sidecar/test_links.py \
  unit/federation/sidecar/test_member_values.py unit/node/groups/test_groups.py \
  unit/node/groups/test_queues.py unit/node/ownership/test_lives.py unit/node/ownership/test_takeover.py \
  unit/security/test_agreed_users.py unit/security/test_dynamic_security.py \
  unit/security/test_identity_http.py unit/security/test_identity_tokens.py \
  unit/support/test_model_campaigns.py
# Both forms: whole conversations, bytes and numbers, whose bounds a compiled integer has and an
# interpreted one has not. Without a C compiler all run interpreted.
BOTH := conformance/test_server* model/test_transcripts* unit/protocol/mqtt/* unit/protocol/topics/* \
  unit/test_formats.py unit/test_hostile_bytes.py unit/log/test_journal.py unit/log/test_record.py \
  unit/protocol/test_websocket_frames.py
TESTS := $(shell find tests -name 'test_*.py' -not -path 'tests/spark/*')
INTERPRETED := $(filter-out $(COMPILED_FILES:%=tests/%), \
  $(filter $(INTERPRETED_FOLDERS:%=tests/unit/%/%) $(wildcard $(INTERPRETED_FILES:%=tests/%)),$(TESTS)))
RUN_INTERPRETED := $(sort $(INTERPRETED) $(filter $(wildcard $(BOTH:%=tests/%)),$(TESTS)))
RUN_COMPILED := $(sort $(filter-out $(INTERPRETED),$(TESTS)))

.PHONY: help setup setup-optimized compile check lint tidy format test test-all test-fast test-interpreted test-spark test-compiled test-processes demo bench bench-federation failover fuzz chaos pipeline long console vendor screenshots stalls sim conformance docs release clean

help:
	@echo "make demo      set up, then run the main job: telemetry through a cluster, kill -9 of a leader, Spark report"
	@echo "               OPTIONS='--stay --screenshots DIR': it goes on until Ctrl-C, pictures of the console"
	@echo "make test      set up, then all tests but the long ones, each in one form, interpreted or compiled"
	@echo "make test-processes  the tests of brokers with several processes each (PROCESSES=2): an hour; make chaos, too, with HOLDFAST_PROCESSES=2"
	@echo "make check     format, lint, types, tidy, fast tests"
	@echo "make bench     speed, against Mosquitto in the same run; pair and cluster in a short form"
	@echo "make failover  downtime and loss of a pair of nodes, takeover time, in full: 20 minutes"
	@echo "make bench-federation  the federation papers' runs beside Mosquitto bridges, faults, a real manager, 500 members simulated: 40 minutes"
	@echo "make fuzz      SECONDS=60 of mutated packets, and of each door of running processes beside a good client"
	@echo "make sim       SEEDS=5000 of each simulation of a part, and of whole clusters: fresh seeds each time, hours"
	@echo "make chaos     ROUNDS=20 of faults under load: one node, clusters of 3 and 5 (as root, with partitions)"
	@echo "make pipeline  all tests of the Spark pipeline, the long ones too: clusters of Spark, kill -9 of all parts"
	@echo "make long      the tests that make test leaves out, but those of the pipeline and the browser"
	@echo "make console   the console in Chromium: every screen, its types, its libraries against npm"
	@echo "make screenshots  the pictures of the console in docs/images"
	@echo "make stalls    STALLS=200 of nodes on one directory held up at every step"
	@echo "make docs      the documentation site, in build/site"
	@echo "make wheel     wheels, compiled and pure, and the sdist; then make deb, make image; make test-packages installs them"
	@echo "make release   all tests, all packages and their tests, then the tag; before: tools/release.py prepare X.Y.Z"
	@echo "make setup     only the set-up the others share"

# Two at a time: pip mostly waits, and the compiler needs little of what it installs.
setup:
	$(MAKE) --jobs 2 $(VENV)/.installed build/compiled.stamp

$(VENV)/.made: tools/system_packages.sh
	tools/system_packages.sh $(PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: pyproject.toml setup.py $(VENV)/.made
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	HOLDFAST_COMPILE=0 $(BIN)/python -m pip install --quiet --no-compile -e '.[dev,spark]'
	touch $@

# An environment with what setup.py compiles with, and nothing else, as pip makes one for a user.
build/compiler/.installed: setup.py $(VENV)/.made
	mkdir -p build
	$(BIN)/python -m venv --clear build/compiler
	build/compiler/bin/python -m pip install --quiet 'setuptools>=77' \
	  $$(sed -n 's/^COMPILER_REQUIRES = \[\(.*\)\]$$/\1/p' setup.py | tr -d '",')
	touch $@

# The compiled form lies beside the source, where the import system prefers it.
compile: build/compiled.stamp

build/compiled.stamp: $(HOT_SOURCES) setup.py tools/compile.sh build/compiler/.installed build/level-$(COMPILE_LEVEL)
	HOLDFAST_COMPILE_LEVEL=$(COMPILE_LEVEL) tools/compile.sh build/compiler/bin/python
	touch $@

build/level-$(COMPILE_LEVEL):
	mkdir -p build
	rm -f build/level-*
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --check-untyped-defs examples

# Limits on size and naming; tools/tidy.toml lists what still exceeds them.
tidy: $(VENV)/.installed
	$(BIN)/python tools/tidy.py

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-fast: $(VENV)/.installed
	HOLDFAST_INTERPRETED=1 $(BIN)/python -m pytest -q -n 2 tests/unit tests/model tests/conformance -m "not long and not spark"

check: lint tidy test-fast

# The workers of a run import all tests at the same moment. In a clean clone each of them would
# compile the same files: 28 s of CPU instead of 9. So one process does it before.
build/tests.stamp: $(VENV)/.installed $(shell find tests src -name '*.py')
	mkdir -p build
	HOLDFAST_INTERPRETED=1 $(BIN)/python -m pytest --collect-only -q -n 0 -p no:cacheprovider tests \
	  > build/tests.log || tail build/tests.log
	touch $@

test-interpreted: build/tests.stamp
	HOLDFAST_INTERPRETED=1 $(BIN)/python tools/run_tests.py interpreted -n $(INTERPRETED_WORKERS) --dist worksteal \
	  $(RUN_INTERPRETED) -m "not spark and not long"

# The first test starts Spark, beside two other runs. Without Java, or a place for the archive, tests go
# on without it.
test-spark: $(VENV)/.installed build/compiled.stamp build/tests.stamp
	-$(BIN)/python -m holdfast.cli.main pipeline prepare
	$(BIN)/python tools/run_tests.py spark -n $(SPARK_WORKERS) --dist loadfile --timeout 300 \
	  tests/spark tests/e2e/test_readme.py -m "spark and not long"

test-compiled: $(VENV)/.installed build/compiled.stamp build/tests.stamp
	@$(BIN)/python tools/is_compiled.py || echo "no C compiler here: all is tested in the interpreted form"
	$(BIN)/python tools/run_tests.py compiled -n $(WORKERS) --dist worksteal $(RUN_COMPILED) \
	  -m "not spark and not long"

# What starts brokers, once more with several processes each.
test-processes: setup
	HOLDFAST_PROCESSES=$(PROCESSES) $(BIN)/python tools/run_tests.py processes -n $(WORKERS) --dist worksteal \
	  tests/e2e tests/interop tests/conformance -m "not spark and not long"

# Three at a time: the interpreted tests run while the compiler does. Those of processes, which mostly
# wait, begin after it, beside Spark's, which do not.
test:
	$(MAKE) --jobs 3 COMPILE_LEVEL=$(or $(LEVEL_THERE),g) test-all

test-all: test-compiled test-interpreted test-spark

demo: setup
	$(BIN)/python examples/demo.py $(OPTIONS)

setup-optimized:
	$(MAKE) COMPILE_LEVEL=2 setup

bench: setup-optimized
	$(BIN)/python -m bench

bench-federation: setup-optimized
	$(BIN)/python -m bench.federation
	$(BIN)/python -m bench.federation_scale

failover: setup-optimized
	$(BIN)/python -m bench.failover
	$(BIN)/python -m bench.takeover

fuzz: setup
	$(BIN)/python tools/fuzz.py --seconds $(SECONDS)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

chaos: setup
	HOLDFAST_CHAOS_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest -q -s tests/e2e/test_kill9.py tests/e2e/test_synced_calls.py \
	  tests/e2e/test_chaos_node.py tests/e2e/test_cluster_chaos.py

pipeline: setup
	HOLDFAST_COMPILE=0 $(BIN)/python -m pip install --quiet -e '.[iceberg-tests]' \
	  || echo "without Iceberg's library: its tests are left out"
	$(BIN)/python -m pytest -q tests/spark tests/e2e/test_readme.py -m spark

# What is too long, or measures time, for `make test`, each in its form: some 15 minutes.
long: setup
	HOLDFAST_COMPILE=0 $(BIN)/python -m pip install --quiet -e '.[types]'
	@status=0; \
	  HOLDFAST_INTERPRETED=1 $(BIN)/python tools/run_tests.py long-interpreted $(INTERPRETED) \
	    -m "long and not spark" || status=1; \
	  $(BIN)/python tools/run_tests.py long $(filter-out tests/browser/%,$(RUN_COMPILED)) \
	    -m "long and not spark" || status=1; \
	  exit $$status

# Every screen in Chromium, and the types of its modules.
console: setup
	$(BIN)/python tools/vendor_console.py --check
	HOLDFAST_INTERPRETED=1 $(BIN)/python -m pytest -q tests/browser tests/unit/api/test_console_files.py

# docs/images, with a cluster, a kill -9 and a federation.
screenshots: setup
	$(BIN)/python tools/screenshots.py

vendor: setup
	$(BIN)/python tools/vendor_console.py

stalls: setup
	HOLDFAST_STALLS=$(STALLS) $(BIN)/python -m pytest -q -s tests/e2e/test_stalls.py

sim: setup
	@status=0; \
	  $(BIN)/python -m tests.model --seeds $(SEEDS) $(if $(FIRST_SEED),--seed $(FIRST_SEED)) || status=1; \
	  $(BIN)/python -m tests.sim --seeds $(SEEDS) $(if $(FIRST_SEED),--seed $(FIRST_SEED)) || status=1; \
	  $(BIN)/python -m tests.sim --charge-cpu --seeds 20 || status=1; \
	  exit $$status

# The documentation site, in build/site.
docs: $(VENV)/.installed
	$(BIN)/python tools/docs_site.py

# Packages, into dist/. deploy/packages/ has what each contains.
wheel: $(VENV)/.installed
	deploy/packages/wheel.sh $(BIN)/python

deb: $(VENV)/.installed
	deploy/packages/deb.sh $(BIN)/python

image: $(VENV)/.installed
	deploy/packages/image.sh $(BIN)/python

# Installs what is in dist/ on bare Debian roots, as root; and the source with each Python here.
test-packages: $(VENV)/.installed
	deploy/packages/programs.sh mmdebstrap skopeo umoci docker-compose podman runc netavark aardvark-dns iptables
	deploy/packages/deploy_tools.sh $(BIN)/python
	HOLDFAST_PACKAGES=1 $(BIN)/python -m pytest -q -s tests/e2e/test_packages.py tests/e2e/test_install.py \
	  tests/e2e/test_containers.py tests/e2e/test_pods.py tests/unit/deploy

# The tag is the last step: it names a commit that was tested and built as a whole.
release: setup-optimized
	$(BIN)/python tools/release.py check
	$(BIN)/python tools/formats.py
	$(MAKE) lint tidy test
	$(MAKE) wheel deb image test-packages docs
	$(BIN)/python tools/release.py tag

conformance: $(VENV)/.installed
	$(BIN)/python tools/conformance.py

clean:
	rm -rf build $(VENV) src/*.egg-info
	find src -name '*.so' -delete
