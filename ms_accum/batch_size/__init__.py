"""Find the largest microbatch that fits into memory, and a useful batch size. The command line may import it."""
from .noise_scale import GradientNoiseScale as GradientNoiseScale
from .planning import PlanError as PlanError
from .planning import plan_micro_batch as plan_micro_batch
