"""All the code that travels with a job: none. fedtail is installed at both ends.

NVFlare builds components of other packages only for jobs that bring code ("BYOC"), or where a site's
``class_allow_list`` names them. This file makes the job one of the first kind; a site that allows no code can list
``fedtail.federate.nvflare.app`` instead, and the job's ``custom`` folders be deleted.
"""
