"""The container image: what a build does inside the base, and how it is driven from outside.

==============  =============================================================================
``bases``       ``bases.lock``: what the images are built on
``assemble``    inside the base: check, install, patch, compile, and collect what was added
``packages``    pure: what an installation did to the packages of the base
``mooncake``    which build of Mooncake a base needs, and whether its libraries resolve
``overlay``     the files that an image has and its base has not
``build``       from outside: a build through the Docker API, and its report
==============  =============================================================================
"""
