"""The ordered patch series for the pinned vLLM: find, apply, revert, verify, rework, lint.

Nothing here imports vLLM or torch: the package is found on disk and handled as files, so that
a start-up check costs a few hashes. Patch paths start with ``vllm/`` and are mapped into the
package directory, whatever that directory is called.

========================  ==========================================================
``patchfile``             one git-format-patch: subject, DEP-3 tags, files it changes
``series``                the patches in order, their lock, the digest
``locate``                where vLLM and the series are
``gitrun``                git, shielded from the user's settings
``tree``                  what state each touched file is in, and its pristine bytes
``swap``                  replace several files: all or none
``records``               which series was applied to a package, kept inside the package
``operations``            status, apply, revert, verify
``checkout``              whether a repository's HEAD is all of the series
``workshop``              series -> git repository -> series
``wheel``                 a package's files against its wheel's RECORD
``table``, ``lint``       the numbers in ``patches/README.md``, and the rules of the series
========================  ==========================================================
"""

from stagetap.patchstack.operations import Status, apply, require_applied, revert, status, verify

__all__ = ["Status", "apply", "require_applied", "revert", "status", "verify"]
