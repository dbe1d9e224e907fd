/* A stand-in for libnvidia-ml.so.1 that is as strict as the real one: nothing works before nvmlInit, a handle
 * must be one that was given, a structure must name its version, a list that is too short is refused with the
 * length that it needs. What it tells is read at each call from the file FAKE_NVML_STATE, a line a device:
 *
 *     UUID lost|well USED_MIB TOTAL_MIB PERCENT [PID MIB PERCENT]...
 *
 * A first line "init NUMBER" makes nvmlInit fail with that number, "hang" makes it wait for ever. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned pid; u64 used; unsigned gpu, compute; } Process;
typedef struct { unsigned pid; u64 time; unsigned sm, memory, encoder, decoder; } Use;
typedef struct { char uuid[96]; int lost; u64 used, total; unsigned percent, count; Process processes[512]; unsigned uses[512]; } Device;

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_FOUND = 6, SHORT = 7, LOST = 15, VERSION = 25 };
static Device devices[16];
static unsigned found, ready;
static int refusal;

static void read_state(void) {
    static char line[65536];
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    found = 0;
    refusal = 0;
    while (file && fgets(line, sizeof line, file)) {
        char word[16];
        int used = 0, more;
        Device *one = &devices[found];
        if (sscanf(line, "init %d", &refusal) == 1) continue;
        if (!strncmp(line, "hang", 4)) for (;;) pause();
        if (sscanf(line, "%95s %15s %llu %llu %u%n", one->uuid, word, &one->used, &one->total, &one->percent, &used) != 5) continue;
        one->lost = !strcmp(word, "lost");
        one->used <<= 20;
        one->total <<= 20;
        for (one->count = 0; one->count < 512; one->count++) {
            Process *process = &one->processes[one->count];
            if (sscanf(line + used, "%u %llu %u%n", &process->pid, &process->used, &one->uses[one->count], &more) != 3) break;
            process->used <<= 20;
            process->gpu = process->compute = ~0u;
            used += more;
        }
        found++;
    }
    if (file) fclose(file);
}

static int device(void *handle, Device **one) {
    if (!ready) return UNINITIALIZED;
    read_state();
    *one = (Device *)handle;
    if (!handle || *one < devices || *one >= devices + found) return INVALID;
    return (*one)->lost ? LOST : OK;
}

int nvmlInitWithFlags(unsigned flags) {
    read_state();
    if (flags & ~3u) return INVALID;
    if (refusal) return refusal;
    ready++;
    return OK;
}
const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "The operation was successful";
    case 9: return "Driver Not Loaded";
    case LOST: return "GPU is lost";
    case 18: return "RM has detected an NVML/RM version mismatch.";
    default: return "Unknown Error";
    }
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!ready) return UNINITIALIZED;
    if (!count) return INVALID;
    read_state();
    *count = found;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (!ready) return UNINITIALIZED;
    read_state();
    if (!handle || index >= found) return INVALID;
    *handle = &devices[index];
    return devices[index].lost ? LOST : OK;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    Device *one;
    int code = device(handle, &one);
    if (code) return code;
    if (!text) return INVALID;
    if (length < strlen(one->uuid) + 1) return SHORT;
    strcpy(text, one->uuid);
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    Device *one;
    int code = device(handle, &one);
    if (code) return code;
    if (!memory) return INVALID;
    memory->total = one->total;
    memory->used = one->used;
    memory->free = one->total - one->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, Memory2 *memory) {
    Device *one;
    int code = device(handle, &one);
    if (code) return code;
    if (!memory) return INVALID;
    if (memory->version != (sizeof(Memory2) | 2u << 24)) return VERSION;
    memory->total = one->total;
    memory->used = one->used;
    memory->reserved = 0;
    memory->free = one->total - one->used;
    return OK;
}
int nvmlDeviceGetUtilizationRates(void *handle, Rates *rates) {
    Device *one;
    int code = device(handle, &one);
    if (code) return code;
    if (!rates) return INVALID;
    rates->gpu = one->percent;
    rates->memory = one->percent / 2;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *list) {
    Device *one;
    int code = device(handle, &one);
    if (code) return code;
    if (!count || (*count && !list)) return INVALID;
    if (*count < one->count) {
        *count = one->count;
        return SHORT;
    }
    memcpy(list, one->processes, one->count * sizeof *list);
    *count = one->count;
    return OK;
}
int nvmlDeviceGetProcessUtilization(void *handle, Use *list, unsigned *count, u64 since) {
    Device *one;
    int code = device(handle, &one);
    (void)since;
    if (code) return code;
    if (!count) return INVALID;
    if (!one->count) return NOT_FOUND;
    if (!list || *count < one->count) {
        *count = one->count;
        return SHORT;
    }
    for (unsigned place = 0; place < one->count; place++) {
        Use use = {one->processes[place].pid, 1000 + place, one->uses[place], 0, 0, 0};
        list[place] = use;
    }
    *count = one->count;
    return OK;
}
