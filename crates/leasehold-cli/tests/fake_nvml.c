/* As much of NVIDIA's library as `leasehold` asks: three devices, one of them in use. */
#include <stdio.h>
#include <string.h>

typedef unsigned int uint;
typedef struct { uint version; unsigned long long total, reserved, free, used; } memory;

static int devices[3] = {0, 1, 2};

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(uint flags) { (void)flags; return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "an error"; }

int nvmlSystemGetDriverVersion(char *text, uint length) {
    snprintf(text, length, "550.54.15");
    return 0;
}

int nvmlDeviceGetCount_v2(uint *count) {
    *count = 3;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(uint index, void **device) {
    if (index >= 3) return 2;
    *device = &devices[index];
    return 0;
}

int nvmlDeviceGetUUID(void *device, char *text, uint length) {
    snprintf(text, length, "GPU-0000000%d-fake", *(int *)device);
    return 0;
}

int nvmlDeviceGetName(void *device, char *text, uint length) {
    (void)device;
    snprintf(text, length, "Fake A100");
    return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory *info) {
    info->total = 40ull << 30;
    info->used = *(int *)device == 1 ? 10ull << 30 : 0;
    info->free = info->total - info->used;
    info->reserved = 0;
    return 0;
}
