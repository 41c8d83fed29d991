"""The sections of a recipe, with types, ranges (recipes/recipe/load.py enforces both) and defaults.

--help and docs/recipes.md print the string below the field. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Interval, MinLen

from models.config import ModelConfig
from models.sizes import SIZES
from parallel.config import (
    ActivationCheckpointingConfig,
    AttentionConfig,
    CompileConfig,
    Float8Config,
    FSDPConfig,
    MeshConfig,
    PipelineConfig,
)
from recipes.checkpoint.config import CheckpointConfig
from recipes.data.config import BatchConfig, DataConfig
from recipes.evaluation.config import ValidationConfig
from recipes.files.reading import user_path
from recipes.metrics.config import MetricsConfig, ProfileConfig
from recipes.optimization.config import ExpertsConfig, OptimizerConfig, ScheduleConfig

if TYPE_CHECKING:
    from parallel.stages import Stages

ONE_OR_SEVERAL = (("data.source", "data.mixture"), ("validation.source", "validation.sources"))
"""Fields that exclude each other: one source, and several."""


@dataclass(frozen=True)
class PluginsConfig:
    """Python of your own that the recipe loads (docs/extending.md). Nothing is loaded unasked."""

    modules: tuple[str, ...] = ()
    """Files ("lion.py"), installed modules ("my_ideas.lion"), or entry points of the group "shardwright.plugins"."""
    versions: dict[str, str] = field(default_factory=dict)
    """Name -> version and hash of the content. A run writes this; a recipe that states it refuses other content."""


@dataclass(frozen=True)
class RunConfig:
    """Name, output folder and length of the run."""

    name: Annotated[str, MinLen(1)] = "unnamed"
    """Name of the run; its files go to `output`/`name`. --run.name auto: that of the file, with a number if taken."""
    output: Annotated[str, MinLen(1)] = "runs"
    """Folder that holds all runs, relative to the current folder."""
    steps: Annotated[int, Ge(1)] = 100
    """Total number of optimizer steps. Raise it to extend a finished run."""
    continue_from: str = ""
    """Fork another run: go on from its newest checkpoint ("runs/trunk") or that of a step ("runs/trunk@12000")."""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0
    """Seed of the initial weights and the data order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" = the GPUs if there are any, otherwise the CPU."""
    deterministic: bool = False
    """Repeat every number to the bit on the same GPUs and versions, slower; a CPU does so by itself."""
    hardware: str = ""
    """GPUs that --check and --plan assume: "8xh100", or "48x8h100" for 48 nodes; "" = those in the recipe's name."""
    prove_first: bool = False
    """run.sh and slurm.sbatch first prove the recipe (docs/parallelism.md), once for each code, recipe and nodes."""
    max_skipped_steps: Annotated[int, Ge(1)] = 10
    """A step whose loss or gradient norm is NaN or infinite is skipped; this many in a row stop the run."""
    loss_spike_z: Annotated[float, Ge(0)] = 0.0
    """Skip steps whose loss is this many standard deviations above the mean of the last 64 good steps; 0 = off."""
    check_replicas_every: Annotated[int, Ge(0)] = 100
    """With mesh.replicate, tensor or pipeline > 1, compare the bits of copies after so many steps and before saves."""
    hang_timeout: Annotated[float, Interval(ge=0, le=86400)] = 600.0
    """End the run after so many seconds without progress; 0 = off. Start-up, first step, validation, saves get more."""
    node_timeout: Annotated[float, Interval(ge=0, le=86400)] = 10.0
    """A node whose launcher is silent for so many seconds is lost: the others end, or restart. 0 = off."""
    spare_nodes: Annotated[int, Ge(0)] = 0
    """This many of the started nodes wait instead of training, and replace lost ones at a restart (docs/cluster.md)."""
    least_nodes: Annotated[int, Ge(0)] = 0
    """Restart on as few nodes as this if others do not come within a minute; 0 = wait for them (docs/cluster.md)."""

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return user_path(self.output) / self.name


@dataclass(frozen=True)
class StageConfig:
    """One [[stages]] table: a part of the run, and the values that differ in it."""

    name: str
    until: int
    """The last step of the stage; in a file also a share of run.steps or tokens, rounded. The last ends the run."""
    changes: dict[str, Any]
    """Dotted key, such as "batch.sequence_length" -> its value in this stage."""


@dataclass(frozen=True)
class Recipe:
    """One run. The sections are in the order in which a run uses them."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=lambda: SIZES["smollm3_debug"])
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    added: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Kind -> name -> what plug-ins register (recipes/plugins/loading.py); their recipes are of a class below this."""
    versions: ClassVar[Mapping[str, str]] = {}
    """Name -> version and hash of each of their plug-ins."""
    loads: ClassVar[tuple[str, ...]] = ()
    """The modules of these, as recipes/plugins/loading.py takes them."""
    stages: tuple[StageConfig, ...] = ()
    """Stages in the order of the run; empty if all of it is one stage. Not a section: stages.py applies them."""

    @property
    def compiles_updates(self) -> bool:
        """Whether AdamW's kernels are compiled on GPUs. Offloaded states are updated on the CPU, by torch's kernel."""
        return self.compile.enabled and self.run.device != "cpu" and not self.fsdp.cpu_offload

    def fields_of(self, kind: str, name: str) -> Any:
        """The section of its own that what a plug-in registered has; None for what has none, and for ours."""
        entry = self.added.get(kind, {}).get(name)
        return getattr(self, name) if entry and entry.fields else None

    def pipeline_stages(self, degree: int) -> "Stages":
        """The stages of the model on so many processes of a pipeline."""
        from parallel.stages import stages_of

        return stages_of(self.model, self.pipeline, degree=degree, sequence_length=self.batch.sequence_length)
