# Every recipe but `lint` and `fmt` starts from a complete environment; `./justw` finds `just`.

# Arguments reach commands as they were given, spaces and all.
set positional-arguments

export HF_HUB_OFFLINE := "1"
export TOKENIZERS_PARALLELISM := "false"
export VLLM_NO_USAGE_STATS := "1"

bin := justfile_directory() / ".venv/bin"

# Show the recipes.
default:
    @'{{ just_executable() }}' --justfile '{{ justfile() }}' --list --unsorted

# Make the environment: venv, vLLM, plugin, patches, the SmolLM2 checkpoint.
setup:
    @sh .setup/run >&2

# Capture SmolLM2 on two stages, and prove it equal to one.
demo *args: setup
    @'{{ bin }}/stagetap' demo "$@"

# Capture SmolLM2 on two stages into Mooncake, and consume it in another process.
demo-online *args: setup
    @'{{ bin }}/stagetap' demo-online "$@"

# Capture SmolLM2 on two stages, train a draft on that, serve it; `--eagle3` for the other kind.
demo-train *args: setup
    @'{{ bin }}/stagetap' demo-train "$@"

# All set-up, the linters and the CI tier of the tests.
test *args: setup lint patch-lint
    @'{{ bin }}/python' -m pytest -m "not full and not gpu" "$@"

# Everything but what needs an accelerator.
test-full *args: setup lint patch-lint
    @'{{ bin }}/python' -m pytest -m "not gpu" "$@"

# Under a minute, no engine.
test-unit *args: setup
    @'{{ bin }}/python' -m pytest tests/unit -m "not engine and not full and not gpu" "$@"

# Real vLLM engines on CPU.
test-engine *args: setup
    @'{{ bin }}/python' -m pytest tests/engine -m "not full and not gpu" "$@"

# The stores, with a real mooncake_master.
test-stores *args: setup
    @'{{ bin }}/python' -m pytest tests/stores -m "not engine and not gpu" "$@"

# Build the image on stand-in bases and run it, two stages equal to one; needs root, or says why.
image-test *args: setup
    @'{{ bin }}/python' -m pytest tests/image -m image "$@"

# Tests that need an accelerator.
test-gpu *args: setup
    @'{{ bin }}/python' -m pytest -m gpu "$@"

# Measure capture, reading and Mooncake; `--only PART`, `--json` for one line of JSON.
bench *args: setup
    @PYTHONPATH=tests '{{ bin }}/python' -m bench "$@"

# A server under a mix of prompts, aborts, disconnects and failing puts: nothing lost or leaked.
soak *args: setup
    @PYTHONPATH=tests '{{ bin }}/python' -m soak "$@"

# Build the image: `cpu` or `cuda`, on the base of docker/bases.lock.
image *args: setup
    @PYTHONPATH=docker '{{ bin }}/python' -m stagetap_image build "$@"

# Fill in the digests of docker/bases.lock, where a registry answers.
pin-base *args: setup
    @PYTHONPATH=docker '{{ bin }}/python' -m stagetap_image pin "$@"

# Write what docs/plan.md and docs/layers.md show anew.
plan-docs: setup
    @PYTHONPATH=tests '{{ bin }}/python' -m plan_docs

# Capture every model of the table on several stages and on one; writes docs/models.{json,md}.
matrix *args: setup
    @PYTHONPATH=tests '{{ bin }}/python' -m matrix "$@"

# Formatting, lint rules, types.
lint:
    @'{{ bin }}/ruff' format --check --quiet .
    @'{{ bin }}/ruff' check --quiet .
    @'{{ bin }}/mypy' --no-error-summary

# Format, and fix what can be fixed.
fmt:
    @'{{ bin }}/ruff' format .
    @'{{ bin }}/ruff' check --fix .

# Folder == series == lock, and the patches regenerate without a diff.
patch-lint:
    @'{{ bin }}/stagetap' patch lint

# Say what state the installed vLLM is in.
patch-status:
    @'{{ bin }}/stagetap' patch status

# Patch the installed vLLM.
patch-apply:
    @'{{ bin }}/stagetap' patch apply

# Give the installed vLLM its released bytes back.
patch-revert:
    @'{{ bin }}/stagetap' patch revert

# Make DIR a git repository of vLLM with a commit for each patch.
[no-cd]
patch-checkout dir *args:
    @'{{ bin }}/stagetap' patch checkout "$@"

# Write series, lock and table from the commits of DIR.
[no-cd]
patch-export dir:
    @'{{ bin }}/stagetap' patch export '{{ dir }}'

# Carry the series to another release; says what conflicts.
[no-cd]
patch-rebase version *args:
    @'{{ bin }}/stagetap' patch rebase --to "$@"

# Measure what each patch meets in other releases, and write the table of docs/patches.md.
patch-drift versions="0.33.0,0.31.0,0.30.0":
    @'{{ bin }}/stagetap' patch drift --from 0.32.0 --versions '{{ versions }}' --write docs/patches.md

# Write each upstream candidate with its test to DIR, for a pull request.
[no-cd]
patch-upstream dir *args:
    @'{{ bin }}/stagetap' patch export --upstream "$@"

# What the plugin uses of vLLM and a pinned release does not have.
surface version:
    @PYTHONPATH=tests '{{ bin }}/python' -m surface '{{ version }}'

# Write the table of patches/README.md anew.
patch-table:
    @'{{ bin }}/stagetap' patch table
