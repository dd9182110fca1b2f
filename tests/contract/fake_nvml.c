/* Stands in for libnvidia-ml.so.1: a machine with two GPUs. FAKE_NVML_INIT is the code that its start returns. */
#include <stdlib.h>

typedef struct { unsigned int gpu, memory; } utilization;

static int devices[2];
static int asked;

int nvmlInitWithFlags(unsigned int flags) {
    const char *code = getenv("FAKE_NVML_INIT");
    return code ? atoi(code) : 0;
}

int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = 2;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if (index > 1)
        return 2; /* invalid argument */
    *device = &devices[index];
    return 0;
}

/* The first question of a process fails, as while a GPU is busy; then each GPU is used at 42 %. */
int nvmlDeviceGetUtilizationRates(void *device, utilization *use) {
    if (!asked++)
        return 999; /* unknown error */
    use->gpu = 42;
    use->memory = 7;
    return 0;
}

typedef struct { unsigned long long total, free, used; } memory;

int nvmlDeviceGetMemoryInfo(void *device, memory *of) {
    of->total = 80000000000ULL;
    of->used = 1000000ULL;
    of->free = of->total - of->used;
    return 0;
}

static int text(char *buffer, unsigned int length, const char *value) {
    unsigned int at = 0;
    for (; value[at] && at + 1 < length; at++)
        buffer[at] = value[at];
    buffer[at] = 0;
    return 0;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    return text(uuid, length, device == &devices[0] ? "GPU-0" : "GPU-1");
}

int nvmlDeviceGetName(void *device, char *name, unsigned int length) { return text(name, length, "NVIDIA Test"); }

int nvmlSystemGetDriverVersion(char *version, unsigned int length) { return text(version, length, "580.65"); }

const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Unknown Error"; }
