/* probe.cu - compiled when a build is configured, to see whether nvcc works. */
__global__ void probe()
{
}
