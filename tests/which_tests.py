"""Which tests belong to a source file: those that should notice that it is wrong, the quickest and likeliest first.

`make mutants` runs them in this order, and `test_which_tests.py` keeps the table true.
"""

GOLDEN = "model/test_golden.py"
EQUATIONS = "model/test_equations.py"
CONTRACT = "model/test_forward_contract.py"
CONFIGURATION = "model/test_configuration.py"
CHECKPOINT = "model/test_checkpoint.py"
INCOMPLETE = "model/test_incomplete_checkpoints.py"
FOREIGN = "model/test_foreign_folders.py"
DOOR = "conversion/test_one_door.py"
INITIALISATION = "model/test_initialisation.py"
VISION = "model/test_vision.py"
IMAGES = "model/test_images.py"
GENERATION = "cache/test_generation.py"
SNAPSHOTS = "cache/test_snapshots.py"
ROLLBACK = "cache/test_rollback.py"
STATIC = "cache/test_static_cache.py"
CAPTURED = "cache/test_captured_steps.py"
MATRIX = "cache/test_generation_matrix.py"
OPS = "operations/test_ops.py"
KDA = "operations/test_kda.py"
KDA_TRITON = "operations/test_kda_triton.py"
MODEL_KERNELS = "model/test_model_kernels.py"
COMPILES = "operations/test_triton_compiles.py"
CLI = "project/test_cli.py"
EVAL = "eval/test_eval.py"
EVAL_SUITE = "eval/test_eval_suite.py"
CONVERSION = "conversion/test_conversion.py"
RESUME = "conversion/test_conversion_resume.py"
PREFIX = "serving/test_prefix_cache.py"
HISTORIES = "serving/test_prefix_histories.py"
TIERS = "serving/test_tiers.py"
ODD_FOLDERS = "serving/test_odd_folders.py"
PRIVACY = "serving/test_privacy.py"
SERVER = "serving/test_server.py"
ONE_LINE = "project/test_one_line.py"
COST = "costs/test_cost.py"
REPLAY = "costs/test_replay.py"
TEXT_RUNS = "training/test_text_training.py"
RECIPE = "recipes/test_small.py"
POST_TRAINING = "recipes/test_post_training.py"
CUT_ROWS = "parallel/test_context_parallel.py"
TENSOR_PARALLEL = "parallel/test_tensor_parallel.py"
BROKEN_OFF = "cache/test_broken_off.py"
BATCHING = "serving/test_batching.py"
MANAGER = "serving/test_batching_manager.py"
FORWARDS = "serving/test_forwards.py"
BATCHING_PREFIXES = "serving/test_batching_prefixes.py"
ADMISSION = "serving/test_prefix_admission.py"
CLIENTS = "serving/test_clients.py"
ANSWERS = "serving/test_answers.py"
ROUTING = "model/test_router_replay.py"
LABELS = "model/test_classification.py"
AHEAD = "operations/test_ahead.py"
LAUNCH = "operations/test_launch_sizes.py"
DEFAULTS = "project/test_defaults.py"

TESTS = {
    "__init__.py": ("project/test_imports.py", CONFIGURATION, "model/test_remote_code.py"),
    "__main__.py": ("project/test_imports.py", CLI, ONE_LINE),
    "cache_kimi_k3.py": (
        DEFAULTS, SNAPSHOTS, BROKEN_OFF, GENERATION, STATIC, ROLLBACK, "model/test_devices.py",
        "cache/test_damaged_cache.py", MATRIX,
    ),
    "cache_layers_kimi_k3.py": (
        SNAPSHOTS, GENERATION, CAPTURED, STATIC, "model/test_devices.py", ROLLBACK, CONTRACT, MATRIX,
    ),
    "adapters_kimi_k3.py": ("training/test_adapters.py",),
    "checkpoint_kimi_k3.py": (
        CHECKPOINT, INCOMPLETE, FOREIGN, DOOR, "model/test_finite_values.py", INITIALISATION, CONVERSION,
        "model/test_remote_code.py", "training/test_adapters.py",
    ),
    "classification_kimi_k3.py": (LABELS, "model/test_remote_code.py"),
    "configuration_kimi_k3.py": (
        CONFIGURATION, INITIALISATION, "common_suite/run.py", CHECKPOINT, "ecosystem/test_doors.py", DOOR,
        "model/test_quantizers.py",
    ),
    "distributed_kimi_k3.py": (TENSOR_PARALLEL, "model/test_devices.py"),
    "files_kimi_k3.py": ("project/test_files.py", "cache/test_damaged_cache.py", TEXT_RUNS),
    "fingerprint_kimi_k3.py": ("cache/test_fingerprint.py", SNAPSHOTS, PREFIX),
    "generation_kimi_k3.py": (DEFAULTS, CAPTURED, GENERATION, ROUTING, ROLLBACK, STATIC, MATRIX),
    "graph_kimi_k3.py": (CAPTURED, "cache/test_graph.py", STATIC),
    "image_processing_kimi_k3.py": ("model/test_image_processing.py", "model/test_remote_code.py"),
    "images_kimi_k3.py": (IMAGES,),
    "kernels_kimi_k3.py": ("project/test_imports.py", GOLDEN, "model/test_remote_code.py"),
    "lora_kimi_k3.py": ("training/test_lora.py", "training/test_adapters.py"),
    "layers_kimi_k3.py": (
        EQUATIONS, GOLDEN, INITIALISATION, GENERATION, "model/test_attention_implementations.py", CONTRACT, ROLLBACK,
        "training/test_training.py", STATIC, MODEL_KERNELS, "model/test_hooks.py", ROUTING,
    ),
    "modeling_kimi_k3.py": (
        EQUATIONS, GOLDEN, CONTRACT, GENERATION, "cache/test_long_generation.py", CHECKPOINT, INITIALISATION,
        "operations/test_cross_entropy.py", "training/test_training.py", "model/test_remote_code.py", TENSOR_PARALLEL,
        "ecosystem/test_doors.py", "ecosystem/test_trl_references.py", BROKEN_OFF, ROUTING,
    ),
    "packing_kimi_k3.py": (
        CONTRACT, "model/test_attention_implementations.py", "training/test_training.py", SNAPSHOTS,
    ),
    "remote_code_kimi_k3.py": ("model/test_remote_code.py", CONVERSION),
    "routing_kimi_k3.py": (ROUTING,),
    "rollback_kimi_k3.py": (ROLLBACK, SNAPSHOTS, PREFIX),
    "runs_kimi_k3.py": (TEXT_RUNS, EVAL, RESUME, ONE_LINE),
    "vision_kimi_k3.py": (VISION, CHECKPOINT, CONVERSION, INITIALISATION),
    "cli/__init__.py": (CLI,),
    "cli/common.py": (CLI, ONE_LINE, TEXT_RUNS),
    "cli/generate.py": (CLI, ONE_LINE),
    "conversion/__init__.py": (CONVERSION,),
    "conversion/adapters.py": ("conversion/test_conversion_adapters.py",),
    "conversion/commands.py": (CLI, CONVERSION, RESUME),
    "conversion/inventory.py": (CONVERSION, RESUME),
    "conversion/plan.py": (CONVERSION, RESUME, "conversion/test_gguf.py"),
    "conversion/run.py": (DEFAULTS, "conversion/test_damaged_work.py", RESUME, CONVERSION),
    "conversion/source.py": (CONVERSION, DOOR, RESUME),
    "conversion/steps.py": (CONVERSION, RESUME),
    "conversion/verify.py": (DEFAULTS, CONVERSION, RESUME),
    "costs/__init__.py": (COST,),
    "costs/commands.py": (CLI, COST, REPLAY),
    "costs/curves.py": (COST, REPLAY),
    "costs/formulas.py": (DEFAULTS, COST, REPLAY),
    "costs/report.py": (DEFAULTS, COST),
    "costs/simulation.py": (DEFAULTS, REPLAY, COST),
    "costs/trace.py": (DEFAULTS, REPLAY),
    "eval/__init__.py": (EVAL,),
    "eval/commands.py": (CLI, EVAL),
    "eval/cost.py": ("eval/test_eval_cost.py",),
    "eval/endpoint.py": (EVAL,),
    "eval/harness.py": ("eval/test_eval_harness.py",),
    "eval/haystack.py": (EVAL_SUITE, EVAL),
    "eval/memory.py": ("eval/test_eval_cost.py", EVAL),
    "eval/reader.py": (EVAL_SUITE, EVAL),
    "eval/report.py": (EVAL,),
    "eval/run.py": (EVAL,),
    "eval/sizing.py": (EVAL_SUITE,),
    "eval/suite.py": (EVAL_SUITE, EVAL),
    "eval/tasks/recall_utils.py": ("eval/test_eval_harness.py",),
    "eval/words.py": (EVAL_SUITE, EVAL),
    "kernels/attn_res.py": (OPS, "operations/test_attn_res_triton.py", GOLDEN, "model/test_memory.py"),
    "kernels/attn_res_triton.py": (LAUNCH, "operations/test_attn_res_triton.py", COMPILES),
    "kernels/cross_entropy.py": (DEFAULTS, "operations/test_cross_entropy.py"),
    "kernels/operators.py": ("operations/test_operators.py", MODEL_KERNELS),
    "kernels/dispatch.py": (
        "operations/test_dispatch.py", "operations/test_router_triton.py", MODEL_KERNELS, "model/test_hooks.py",
    ),
    "kernels/expert_rows_triton.py": (LAUNCH, "operations/test_expert_rows_triton.py", COMPILES),
    "kernels/experts.py": (
        OPS, "operations/test_expert_rows_triton.py", INITIALISATION, "operations/test_experts_triton.py",
        "training/test_training.py",
    ),
    "kernels/experts_few_gluon.py": ("operations/test_experts_triton.py", COMPILES),
    "kernels/experts_gluon.py": ("operations/test_experts_triton.py", COMPILES),
    "kernels/experts_triton.py": (
        LAUNCH, "operations/test_inline_ptx.py", "operations/test_experts_triton.py", COMPILES,
    ),
    "kernels/gluon_tools.py": (COMPILES,),
    "kernels/kda.py": (KDA, GOLDEN, KDA_TRITON),
    "kernels/kda_backward_triton.py": (KDA_TRITON, COMPILES),
    "kernels/kda_chunk_triton.py": (LAUNCH, KDA_TRITON, COMPILES),
    "kernels/kda_context.py": (KDA, CUT_ROWS, KDA_TRITON),
    "kernels/kda_step.py": (KDA, GENERATION, ROLLBACK, KDA_TRITON),
    "kernels/kda_step_triton.py": (KDA_TRITON, MODEL_KERNELS, COMPILES),
    "kernels/mla_decode.py": ("operations/test_mla_decode_triton.py", MODEL_KERNELS),
    "kernels/mla_decode_gluon.py": ("operations/test_mla_decode_triton.py", COMPILES),
    "kernels/mla_decode_triton.py": (LAUNCH, "operations/test_mla_decode_triton.py", COMPILES),
    "kernels/mla_prefill.py": ("operations/test_mla_prefill.py", "model/test_memory.py"),
    "kernels/mxfp4.py": (OPS, CONVERSION, "training/test_qat.py"),
    "kernels/norms.py": (EQUATIONS, "operations/test_norms_triton.py", GOLDEN),
    "kernels/norms_triton.py": (LAUNCH, "operations/test_norms_triton.py", COMPILES),
    "kernels/router.py": (DEFAULTS, OPS, "operations/test_router_triton.py", EQUATIONS),
    "kernels/router_triton.py": ("operations/test_router_triton.py", COMPILES),
    "kernels/short_conv.py": (OPS, KDA_TRITON, GENERATION),
    "kernels/short_conv_triton.py": (KDA_TRITON, COMPILES),
    "kernels/situ.py": (OPS, "operations/test_situ_triton.py", EQUATIONS),
    "kernels/situ_triton.py": ("operations/test_situ_triton.py", COMPILES),
    "kernels/triton_tools.py": (COMPILES, "operations/test_dispatch.py", "operations/test_situ_triton.py"),
    "parallel/__init__.py": (CUT_ROWS,),
    "parallel/context.py": (CUT_ROWS,),
    "parallel/sharding.py": ("parallel/test_sharding.py",),
    "parallel/wire.py": (TENSOR_PARALLEL, CUT_ROWS),
    "serving/__init__.py": (SERVER,),
    "serving/answers.py": (ANSWERS, "serving/test_openai_client.py", "serving/test_lm_eval.py"),
    "serving/apart.py": ("serving/test_apart.py",),
    "serving/batch.py": (BATCHING, "serving/test_apart.py", FORWARDS),
    "serving/batching.py": (BATCHING, FORWARDS, MANAGER, BATCHING_PREFIXES, "serving/test_stop.py"),
    "serving/commands.py": (CLI, "serving/test_cache_commands.py", REPLAY, SERVER, ONE_LINE),
    "serving/engine.py": (SERVER, CLIENTS),
    "serving/forwards.py": (FORWARDS, BATCHING),
    "serving/manager.py": (MANAGER,),
    "serving/metrics.py": (ANSWERS, SERVER),
    "serving/middleware.py": (ANSWERS, CLIENTS),
    "serving/pool.py": (BATCHING, FORWARDS),
    "serving/prefix_cache.py": (PREFIX, HISTORIES, SERVER, DEFAULTS),
    "serving/prefix_folder.py": ("serving/test_cache_commands.py", ODD_FOLDERS, PREFIX),
    "serving/prefix_index.py": (PREFIX, HISTORIES, PRIVACY, ADMISSION),
    "serving/prefix_requests.py": (BATCHING_PREFIXES,),
    "serving/prefix_store.py": (PREFIX, HISTORIES, PRIVACY, BATCHING_PREFIXES, ADMISSION),
    "serving/protocol.py": (ANSWERS, SERVER, CLIENTS),
    "serving/replay.py": (REPLAY,),
    "serving/sampling.py": ("serving/test_sampling.py", "serving/test_structured.py", FORWARDS, MANAGER),
    "serving/scheduler.py": (BATCHING, BATCHING_PREFIXES, FORWARDS),
    "serving/scoring.py": (BATCHING, ANSWERS),
    "serving/sent.py": ("serving/test_sampling.py", FORWARDS),
    "serving/server.py": (SERVER, ANSWERS, CLIENTS),
    "serving/stopping.py": ("serving/test_stop.py", ANSWERS),
    "serving/structured.py": ("serving/test_structured.py",),
    "serving/tiers.py": (TIERS, ODD_FOLDERS, PRIVACY, PREFIX, HISTORIES),
    "serving/token_texts.py": (ANSWERS,),
    "speculative/__init__.py": ("speculative/test_speculative.py",),
    "speculative/decoding.py": (DEFAULTS, "speculative/test_speculative.py"),
    "speculative/draft.py": ("speculative/test_speculative.py",),
    "speculative/training.py": ("speculative/test_speculative.py",),
    "training/__init__.py": ("training/test_muon.py", "training/test_lora.py"),
    "training/balancing.py": (DEFAULTS, "training/test_balancing.py"),
    "training/captured.py": ("training/test_captured_training.py",),
    "training/commands.py": (CLI, TEXT_RUNS),
    "training/lora.py": (
        DEFAULTS, "training/test_lora.py", "training/test_trl.py", "conversion/test_conversion_adapters.py",
    ),
    "training/muon.py": (DEFAULTS, "training/test_muon.py", "parallel/test_sharding.py"),
    "training/qat.py": (DEFAULTS, "training/test_qat.py", RECIPE),
    "training/replay.py": (POST_TRAINING,),
    "training/text_data.py": (TEXT_RUNS, "training/test_captured_training.py"),
    "training/text_run.py": (TEXT_RUNS, "training/test_captured_training.py"),
    "recipes/post_training.py": (POST_TRAINING,),
    "recipes/small/corpus.py": (RECIPE,),
    "recipes/small/data.py": (RECIPE,),
    "recipes/small/episodes.py": (RECIPE,),
    "recipes/small/measure.py": (RECIPE, "model/test_small_checkpoint.py"),
    "recipes/small/model.py": (RECIPE, "model/test_small_checkpoint.py"),
    "recipes/small/tokenizer.py": (RECIPE,),
    "recipes/small/train.py": (RECIPE,),
    "serving/connections.py": (CLIENTS,),
    "serving/prompts.py": (CLIENTS, SERVER, ANSWERS),
    "warmup_kimi_k3.py": (AHEAD,),
    "cli/warmup.py": (AHEAD, CLI),
    "kernels/ahead.py": (AHEAD,),
}  # fmt: skip

# Marked `quick`: file -> what is left out of it, a regular expression of names of tests ("" is nothing). The tests that
# catch most careless changes a second, of every area; look at `--durations` before adding one.
QUICK = {
    "project/test_imports.py": "imports_load",
    "project/test_files.py": "",
    "project/test_mutants.py": "",
    "project/test_tiny.py": "",
    "project/test_which_tests.py": "every_source",
    CLI: "say_the_same",
    CONFIGURATION: "auto_classes",
    EQUATIONS: "",
    GOLDEN: "any_split|greedy|bfloat16|kimi",
    INITIALISATION: "learns|every_tensor",
    CHECKPOINT: "released_model|agree|text_class|broken_tensor|device_maps|tied|shards|own_kimi|backbone|listed",
    CONTRACT: "compile|packed_doc|another_precision|disk|holds_less|adapters|eager|kimi_linear|pieces",
    GENERATION: "sampling|beams|continues|changes_nothing.*kimi",
    SNAPSHOTS: "pickled|another_process|random|inside_a_forward",
    ROLLBACK: "any_drafter|prompt_lookup|costs_less|acceptance|autocast|longer|kimi_linear",
    STATIC: "compiles|growing_cache|padding|second_turn|continued|kimi",
    "cache/test_graph.py": "given",
    INCOMPLETE: "path|changed|every_tensor.*dequantize",
    OPS: "",
    KDA: "(softplus|bound).*float|near",
    KDA_TRITON: "head_sizes|short_conv|near-zero|the-bound|narrow|steep"
    "|sequence|near_parallel|depends|unwritten|boundaries|several|-3]"
    "|6-32|in_place|step_with|a_part|ragged|step_of_many",
    "operations/test_attn_res_triton.py": "without_the_norm|float32-9-|not_compile",
    "operations/test_cross_entropy.py": "trainer|sum|all_logits",
    "operations/test_dispatch.py": "",
    "operations/test_expert_rows_triton.py": "each_kernel|three-bl",
    "operations/test_experts_triton.py": "every_activation|swiglu|uncapped|many"
    "|two-ex|one-ex|three-parts|scale_byte|one-program",
    "operations/test_inline_ptx.py": "",
    "operations/test_mla_decode_triton.py": r"-(3-2|20-0|2-1)]|form\[float32-3|read\[3|the_model",
    "operations/test_norms_triton.py": "",
    "operations/test_router_triton.py": "gradients|not_compile",
    "operations/test_situ_triton.py": "-(0.3|60.0|0.0001)]",
    "training/test_balancing.py": "fifty|two_processes|skewed_router|trainer",
    "training/test_lora.py": "learn|not_finite|each_row|fresh|merging_into|export|no_tensor"
    "|without|two_adapters|combination|mixed"
    "|dropout",
    "training/test_muon.py": "trainer|qk_clip_measures",
    "training/test_qat.py": "training_lowers",
    TEXT_RUNS: "run|settings|killed|loses_no_state|saved_model|disk|two_processes_do",
    "training/test_training.py": "seeds|trainer|random|resized|resume",
    CONVERSION: "scales_beyond|tied_emb|released_model|every_form|native_class|golden_logits|any_bits"
    "|that_can_be_decoded|same_form|workers",
    "conversion/test_conversion_adapters.py": "do_not_fit|two_factors",
    COST: "command|counter",
    REPLAY: "real_cache|medians|knee",
    HISTORIES: "",
    PREFIX: "a_kill|two_processes|threads|every_family|write_back_moves|inside_a_forward",
    TIERS: "",
    SERVER: "many_clients|greedy_answers|stop_|same_sample|limited|second_turn",
    "speculative/test_speculative.py": r"not_biased|killed|learns|always_accepted|plain_greedy.*\[[239]",
    TENSOR_PARALLEL: "two_processes",
    RECIPE: "stopped_run|time_limit",
}  # fmt: skip
