# Images for several processors at once, by BuildKit. The names come from the one file that has them:
#
#   (set -a; . deploy/.env; docker buildx bake -f deploy/docker-bake.hcl --push)
#   (set -a; . deploy/.env; docker buildx bake -f deploy/docker-bake.hcl server --set '*.platform=linux/amd64' --load)
variable "SERVER_IMAGE" {}
variable "GPU_SERVER_IMAGE" {}
variable "WORKER_IMAGE" {}
variable "VERSION" { # the label; the default is the Containerfile's
  default = null
}
variable "REVISION" {
  default = ""
}
variable "SOURCE" {
  default = ""
}
variable "PIP_EXTRA_INDEX_URL" { # of PyTorch's builds for CPUs
  default = "https://download.pytorch.org/whl/cpu"
}
variable "SOURCE_DATE_EPOCH" {
  default = null
}

group "default" {
  targets = ["server", "worker"]
}

target "common" {
  context    = "."
  dockerfile = "deploy/Containerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  args = {
    VERSION           = VERSION
    REVISION          = REVISION
    SOURCE            = SOURCE
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
}

target "server" {
  inherits = ["common"]
  target   = "server"
  tags     = [SERVER_IMAGE]
  args     = { PIP_EXTRA_INDEX_URL = PIP_EXTRA_INDEX_URL }
}

target "worker" {
  inherits = ["common"]
  target   = "quickstart"
  tags     = [WORKER_IMAGE]
  args     = { PIP_EXTRA_INDEX_URL = PIP_EXTRA_INDEX_URL }
}

# Not in the default group: PyTorch with CUDA takes gigabytes.
target "server-gpu" {
  inherits  = ["common"]
  target    = "server-gpu"
  platforms = ["linux/amd64"]
  tags      = [GPU_SERVER_IMAGE]
}
