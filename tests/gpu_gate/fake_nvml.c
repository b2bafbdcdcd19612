/* A libnvidia-ml.so.1 without a GPU. The host that it shows stands in the text file $FAKE_NVML_STATE, read again on
   every call, so that a test changes the host while the gate looks at it. Lines:

     gpu UUID NAME total reserved used utilization ecc mode mig persistence remap_pending remap_failed retire recovery
     proc GPU PID BYTES c|g|m        a process on a GPU (bytes -1: not available)
     fail FUNCTION CODE GPU          that call returns CODE (GPU -1: on every device; else on that index alone)
     hang FUNCTION SECONDS GPU       that call does not return for a while
     print FUNCTION                  that call writes to standard output

   Sizes are in bytes. The structures are those of NVML's API. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, SMALL = 7, UNKNOWN = 999, MAX_GPUS = 16, MAX_PROCS = 64 };
typedef unsigned long long u64;
typedef struct {
  char uuid[96], name[64];
  u64 total, reserved, used, ecc;
  unsigned utilization, mode, mig, persistence, pending, failed, retire, recovery;
} Gpu;
typedef struct { int gpu; unsigned pid; long long bytes; char kind; } Proc;
static Gpu gpus[MAX_GPUS];
static Proc procs[MAX_PROCS];
static int gpu_count, proc_count;

static int index_of(void *handle) { return (int)((long)handle - 1); }

/* Read the state and apply the faults meant for `function` on device `device`. */
static int enter(const char *function, int device) {
  char line[512], name[128];
  int code = OK, value, which;
  FILE *file = fopen(getenv("FAKE_NVML_STATE") ? getenv("FAKE_NVML_STATE") : "", "r");
  gpu_count = proc_count = 0;
  if (!file) return UNKNOWN;
  while (fgets(line, sizeof line, file)) {
    Gpu *g = &gpus[gpu_count];
    Proc *p = &procs[proc_count];
    if (sscanf(line, "fail %127s %d %d", name, &value, &which) == 3) {
      if (!strcmp(name, function) && (which < 0 || which == device)) code = value;
    } else if (sscanf(line, "hang %127s %d %d", name, &value, &which) == 3) {
      if (!strcmp(name, function) && (which < 0 || which == device)) sleep(value);
    } else if (sscanf(line, "print %127s", name) == 1) {
      if (!strcmp(name, function)) { puts("NVRM: a message"); fflush(stdout); }
    } else if (gpu_count < MAX_GPUS &&
               sscanf(line, "gpu %95s %63s %llu %llu %llu %u %llu %u %u %u %u %u %u %u", g->uuid, g->name, &g->total,
                      &g->reserved, &g->used, &g->utilization, &g->ecc, &g->mode, &g->mig, &g->persistence, &g->pending,
                      &g->failed, &g->retire, &g->recovery) == 14) {
      gpu_count++;
    } else if (proc_count < MAX_PROCS &&
               sscanf(line, "proc %d %u %lld %c", &p->gpu, &p->pid, &p->bytes, &p->kind) == 4) {
      proc_count++;
    }
  }
  fclose(file);
  return code;
}

#define HOST int code = enter(__func__, -1); if (code) return code
#define DEVICE                                                       \
  int at = index_of(handle), code = enter(__func__, at);             \
  Gpu *g = &gpus[at >= 0 && at < gpu_count ? at : 0];                \
  if (code || at < 0 || at >= gpu_count) return code ? code : INVALID; \
  (void)g

int nvmlInitWithFlags(unsigned flags) { (void)flags; HOST; return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { HOST; snprintf(text, size, "999.0"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { HOST; *count = (unsigned)gpu_count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  int code = enter(__func__, (int)index);
  if (code) return code;
  if ((int)index >= gpu_count) return INVALID;
  *handle = (void *)(long)(index + 1);
  return OK;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { DEVICE; snprintf(text, size, "%s", g->uuid); return OK; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { DEVICE; snprintf(text, size, "%s", g->name); return OK; }

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) {
  DEVICE;
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", at + 1);
  return OK;
}
typedef struct { u64 total, free, used; } Memory1;
int nvmlDeviceGetMemoryInfo(void *handle, Memory1 *m) {
  DEVICE;
  *m = (Memory1){g->total, g->total - g->reserved - g->used, g->used + g->reserved};
  return OK;
}
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
int nvmlDeviceGetMemoryInfo_v2(void *handle, Memory2 *m) {
  DEVICE;
  m->total = g->total; m->reserved = g->reserved; m->used = g->used; m->free = g->total - g->reserved - g->used;
  return OK;
}
typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(void *handle, Utilization *u) { DEVICE; *u = (Utilization){g->utilization, 0}; return OK; }
int nvmlDeviceGetComputeMode(void *handle, unsigned *mode) { DEVICE; *mode = g->mode; return OK; }
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *next) { DEVICE; *now = *next = g->mig; return OK; }
int nvmlDeviceGetPersistenceMode(void *handle, unsigned *on) { DEVICE; *on = g->persistence; return OK; }
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, u64 *count) {
  (void)type; (void)counter;
  DEVICE;
  *count = g->ecc;
  return OK;
}
int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  DEVICE;
  *corrected = *uncorrected = 0; *pending = g->pending; *failed = g->failed;
  return OK;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, unsigned *pending) { DEVICE; *pending = g->retire; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, u64 *reasons) { DEVICE; *reasons = 0; return OK; }
typedef struct { unsigned field, scope; long long at, latency; int type, code; union { unsigned number; u64 whole; } value; } Field;
int nvmlDeviceGetFieldValues(void *handle, int count, Field *fields) {
  DEVICE;
  for (int i = 0; i < count; i++) { fields[i].code = OK; fields[i].value.whole = 0; fields[i].value.number = g->recovery; }
  return OK;
}

typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } Info;
static int processes(const char *function, void *handle, char kind, unsigned *count, Info *out) {
  int at = index_of(handle), code = enter(function, at);
  unsigned found = 0, room = out ? *count : 0;
  if (code) return code;
  for (int i = 0; i < proc_count; i++) {
    if (procs[i].gpu != at || procs[i].kind != kind) continue;
    if (found < room) out[found] = (Info){procs[i].pid, (u64)procs[i].bytes, ~0u, ~0u};
    found++;
  }
  *count = found;
  return found > room ? SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *n, Info *out) { return processes(__func__, handle, 'c', n, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *n, Info *out) { return processes(__func__, handle, 'g', n, out); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *n, Info *out) { return processes(__func__, handle, 'm', n, out); }
