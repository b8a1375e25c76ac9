/* libnvidia-ml.so.1 without a GPU: NVML's ABI for the real pynvml, answering from a text file that is read at each call.
 *
 * stub.py compiles it, and writes the file that NVML_STUB names. Each line is WHERE, KEY and ANSWER with tabs between:
 * WHERE is `system`, the index of a GPU, or GPU.INSTANCE for a MIG instance; KEY is a function without its version, with
 * what it is asked for in parentheses, or `*` for all of a device. ANSWER is text, or integers (`7+2.5` grows by 2.5 a
 * second), or a fault: `!error CODE`, `!hang` (as long as the file says so), `!exit CODE`, `!late MILLISECONDS ANSWER`.
 * What the file does not have is not supported; a field's answer without a scope is that of all scopes. An event is the
 * line `event GPU XID`, told once to each set of events that was made before it. `system generation N` is the driver's
 * life: after it changes, a call says UNINITIALIZED until nvmlInit is called again.
 *
 * Layouts and codes: nvml.h of CUDA 12.9. `stubAbi` gives the layouts as text, for a test to compare with pynvml's.
 */
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    UNSCRIPTED = -1, SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25, UNKNOWN = 999,
};
enum { MAX_GPUS = 16, MAX_MIGS = 8, MAX_ANSWER = 16384, MAX_INTS = 512, POLL_MS = 5, NO_INSTANCE = -1 };
enum { NUM_SLOTS = 1 << 14, NUM_KEPT = NUM_SLOTS / 2 };

typedef unsigned long long u64;
typedef struct Device { int gpu, mig; } *nvmlDevice_t;
typedef struct EventSet { int is_registered[MAX_GPUS]; int told, changes; } *nvmlEventSet_t;

typedef struct { u64 total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned pid; u64 usedGpuMemory; } nvmlProcessInfo_v1_t;
typedef struct { unsigned pid; u64 usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } nvmlProcessInfo_v2_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct { nvmlDevice_t device; u64 eventType, eventData; unsigned gpuInstanceId, computeInstanceId; } nvmlEventData_t;
typedef union { double dVal; unsigned uiVal; unsigned long ulVal; u64 ullVal; long long sllVal; int siVal; unsigned short usVal; } nvmlValue_t;
typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType, nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *script;
static struct timespec script_time;
static ino_t script_inode;
static const char *slots[NUM_SLOTS]; /* Lines of the script, by the hash of WHERE and KEY. */
static unsigned num_reloads;
static int num_inits;
static char generation[64];
static struct Device devices[MAX_GPUS][MAX_MIGS + 1]; /* Of each GPU: itself, then its instances. */

/* ---- The script ------------------------------------------------------------------------------------------------ */

static unsigned slot_of(const char *start, size_t length) {
    unsigned hash = 2166136261u;
    while (length--) hash = (hash ^ (unsigned char)*start++) * 16777619u;
    return hash % NUM_SLOTS;
}

/* Sorts the lines of the script into slots; the first of several with one key counts, as it is found first. */
static void sort_in(void) {
    int count = 0;
    memset(slots, 0, sizeof slots);
    for (char *line = script; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        size_t where = strcspn(line, "\t\n"), key = line[where] == '\t' ? strcspn(line + where + 1, "\t\n") : 0;
        if (line[where + 1 + key] != '\t') continue;
        if (!strncmp(line, "event\t", 6)) continue;
        if (++count > NUM_KEPT) abort();
        unsigned slot = slot_of(line, where + 1 + key + 1);
        while (slots[slot]) slot = (slot + 1) % NUM_SLOTS;
        slots[slot] = line;
    }
}

static void reload(void) {
    const char *path = getenv("NVML_STUB");
    struct stat found;
    if (!path || stat(path, &found)) return;
    int is_same = found.st_ino == script_inode && found.st_mtim.tv_sec == script_time.tv_sec && found.st_mtim.tv_nsec == script_time.tv_nsec;
    if (script && is_same) return;
    FILE *file = fopen(path, "rb");
    if (!file) return;
    char *text = calloc(1, found.st_size + 1);
    size_t length = fread(text, 1, found.st_size, file);
    fclose(file);
    text[length] = 0;
    free(script);
    script = text, script_time = found.st_mtim, script_inode = found.st_ino;
    num_reloads++;
    sort_in();
}

/* Copies the answer to a key; returns 0 where there is none. */
static int look_up(const char *where, const char *key, char *answer) {
    char start[256];
    size_t length = snprintf(start, sizeof start, "%s\t%s\t", where, key);
    for (unsigned slot = slot_of(start, length); slots[slot]; slot = (slot + 1) % NUM_SLOTS) {
        if (strncmp(slots[slot], start, length)) continue;
        const char *found = slots[slot] + length;
        size_t size = strcspn(found, "\n");
        if (size >= MAX_ANSWER) size = MAX_ANSWER - 1;
        memcpy(answer, found, size);
        answer[size] = 0;
        return 1;
    }
    return 0;
}

static int num_gpus(void) {
    char where[8], answer[MAX_ANSWER];
    int count = 0;
    do snprintf(where, sizeof where, "%d", count);
    while (look_up(where, "nvmlDeviceGetUUID", answer) && ++count < MAX_GPUS);
    return count;
}

static void pause_ms(long milliseconds) {
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void name_place(const struct Device *device, char *where) {
    if (!device) strcpy(where, "system");
    else if (device->mig == NO_INSTANCE) sprintf(where, "%d", device->gpu);
    else sprintf(where, "%d.%d", device->gpu, device->mig);
}

static int is_handle(const struct Device *device) {
    const struct Device *first = &devices[0][0];
    if (device < first || device >= first + MAX_GPUS * (MAX_MIGS + 1)) return 0;
    return ((uintptr_t)device - (uintptr_t)first) % sizeof *device == 0 && device->gpu < num_gpus();
}

/* Carries out the faults of an answer: returns a code, UNSCRIPTED without one, and leaves what is to be said in `answer`. */
static int ask_script(const struct Device *device, const char *key, char *answer) {
    char where[16], life[MAX_ANSWER];
    for (int has_waited = 0;;) {
        pthread_mutex_lock(&lock);
        reload();
        int code = SUCCESS, is_known = 0;
        if (!num_inits || (look_up("system", "generation", life) && strcmp(life, generation))) code = UNINITIALIZED;
        else if (device && !is_handle(device)) code = INVALID_ARGUMENT;
        else {
            if (device && device->mig != NO_INSTANCE) { /* An instance shares the fate of its GPU. */
                sprintf(where, "%d", device->gpu);
                is_known = look_up(where, "*", answer);
            }
            name_place(device, where);
            is_known = is_known || look_up(where, "*", answer) || look_up(where, key, answer);
        }
        pthread_mutex_unlock(&lock);
        if (code) return code;
        if (!is_known) return UNSCRIPTED;
        if (!strncmp(answer, "!hang", 5)) pause_ms(POLL_MS);
        else if (!strncmp(answer, "!late ", 6)) {
            char *rest;
            long late_ms = strtol(answer + 6, &rest, 10);
            memmove(answer, rest + (*rest == ' '), strlen(rest + (*rest == ' ')) + 1);
            if (!has_waited++) pause_ms(late_ms);
            return SUCCESS;
        }
        else if (!strncmp(answer, "!error ", 7)) return atoi(answer + 7);
        else if (!strncmp(answer, "!exit ", 6)) _exit(atoi(answer + 6));
        else return SUCCESS;
    }
}

static int ask(const struct Device *device, const char *key, char *answer) {
    int code = ask_script(device, key, answer);
    return code == UNSCRIPTED ? NOT_SUPPORTED : code;
}

/* Reads at most `most` integers; one beyond 64 bits is the highest. */
static int integers(const char *answer, u64 *values, int most) {
    int count = 0;
    for (char *end; count < most; answer = end) {
        u64 value = *(answer + strspn(answer, " ")) == '-' ? (u64)strtoll(answer, &end, 10) : strtoull(answer, &end, 10);
        if (end == answer) break;
        if (*end == '+') value += (u64)(strtod(end + 1, &end) * now_s());
        values[count++] = value;
    }
    return count;
}

static int ask_integers(const struct Device *device, const char *key, u64 *values, int num_wanted) {
    char answer[MAX_ANSWER];
    int code = ask(device, key, answer);
    if (code) return code;
    memset(values, 0, num_wanted * sizeof *values);
    return integers(answer, values, num_wanted) ? SUCCESS : UNKNOWN;
}

static int ask_unsigned(const struct Device *device, const char *key, unsigned *value) {
    u64 found;
    int code = value ? ask_integers(device, key, &found, 1) : INVALID_ARGUMENT;
    if (!code) *value = (unsigned)found;
    return code;
}

static int ask_text(const struct Device *device, const char *key, char *text, unsigned size) {
    char answer[MAX_ANSWER];
    int code = text ? ask(device, key, answer) : INVALID_ARGUMENT;
    if (!code && strlen(answer) >= size) return INSUFFICIENT_SIZE;
    if (!code) strcpy(text, answer);
    return code;
}

/* ---- The library ----------------------------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags) {
    char answer[MAX_ANSWER] = "";
    (void)flags;
    pthread_mutex_lock(&lock);
    reload();
    int code = look_up("system", "nvmlInit", answer) && !strncmp(answer, "!error ", 7) ? atoi(answer + 7) : SUCCESS;
    if (!code) {
        for (int gpu = 0; gpu < MAX_GPUS; gpu++)
            for (int at = 0; at <= MAX_MIGS; at++) devices[gpu][at] = (struct Device){gpu, at - 1};
        num_inits++;
        generation[0] = 0;
        if (look_up("system", "generation", answer)) snprintf(generation, sizeof generation, "%.60s", answer);
    }
    pthread_mutex_unlock(&lock);
    if (!code && !strncmp(answer, "!hang", 5)) for (;;) pause_ms(1000);
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!num_inits) return UNINITIALIZED;
    num_inits--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "stub's error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) { return ask_text(NULL, "nvmlSystemGetDriverVersion", text, size); }
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { return ask_text(NULL, "nvmlSystemGetNVMLVersion", text, size); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    char answer[MAX_ANSWER];
    int code = ask_script(NULL, "nvmlDeviceGetCount", answer);
    if (code != UNSCRIPTED) return code ? code : ask_unsigned(NULL, "nvmlDeviceGetCount", count);
    pthread_mutex_lock(&lock);
    *count = num_gpus();
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    char answer[MAX_ANSWER];
    if (!device || index >= MAX_GPUS) return INVALID_ARGUMENT;
    int code = ask_script(&devices[index][0], "nvmlDeviceGetHandleByIndex", answer);
    if (!code || code == UNSCRIPTED) *device = &devices[index][0], code = SUCCESS;
    return code;
}

int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    if (!is_handle(device)) return INVALID_ARGUMENT;
    *index = device->gpu;
    return SUCCESS;
}

#define TEXT(name) int name(nvmlDevice_t device, char *text, unsigned size) { return ask_text(device, #name, text, size); }
#define UNSIGNED(name) int name(nvmlDevice_t device, unsigned *value) { return ask_unsigned(device, #name, value); }
#define BY_KIND(name) int name(nvmlDevice_t device, unsigned kind, unsigned *value) { \
    char key[128]; snprintf(key, sizeof key, #name "(%u)", kind); return ask_unsigned(device, key, value); }
#define LONG(name) int name(nvmlDevice_t device, u64 *value) { \
    return value ? ask_integers(device, #name, value, 1) : INVALID_ARGUMENT; }

TEXT(nvmlDeviceGetName)
TEXT(nvmlDeviceGetUUID)
UNSIGNED(nvmlDeviceGetPowerUsage)
UNSIGNED(nvmlDeviceGetEnforcedPowerLimit)
UNSIGNED(nvmlDeviceGetMaxMigDeviceCount)
UNSIGNED(nvmlDeviceGetCurrPcieLinkGeneration)
UNSIGNED(nvmlDeviceGetMaxPcieLinkGeneration)
UNSIGNED(nvmlDeviceGetGpuMaxPcieLinkGeneration)
UNSIGNED(nvmlDeviceGetCurrPcieLinkWidth)
UNSIGNED(nvmlDeviceGetMaxPcieLinkWidth)
UNSIGNED(nvmlDeviceGetPcieReplayCounter)
UNSIGNED(nvmlDeviceGetPerformanceState)
UNSIGNED(nvmlDeviceGetNumaNodeId)
BY_KIND(nvmlDeviceGetTemperature)
BY_KIND(nvmlDeviceGetClockInfo)
BY_KIND(nvmlDeviceGetMaxClockInfo)
BY_KIND(nvmlDeviceGetNvLinkState)
LONG(nvmlDeviceGetCurrentClocksEventReasons)
LONG(nvmlDeviceGetCurrentClocksThrottleReasons)

int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    char bus_id[32];
    int code = info ? ask_text(device, "nvmlDeviceGetPciInfo", bus_id, sizeof bus_id) : INVALID_ARGUMENT;
    if (code) return code;
    memset(info, 0, sizeof *info);
    if (sscanf(bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device) != 3) return UNKNOWN;
    snprintf(info->busId, sizeof info->busId, "%08X:%02X:%02X.0", info->domain, info->bus, info->device);
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%04X:%02X:%02X.0", info->domain & 0xffff, info->bus & 0xff, info->device & 0xff);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    u64 values[3];
    int code = memory ? ask_integers(device, "nvmlDeviceGetMemoryInfo", values, 3) : INVALID_ARGUMENT;
    if (!code) *memory = (nvmlMemory_t){values[0], values[1], values[2]};
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    u64 values[4];
    if (!memory) return INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2u << 24)) return VERSION_MISMATCH;
    int code = ask_integers(device, "nvmlDeviceGetMemoryInfo", values, 4);
    if (!code) *memory = (nvmlMemory_v2_t){memory->version, values[0], values[3], values[1], values[2]};
    return code;
}

int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    u64 values[2];
    int code = rates ? ask_integers(device, "nvmlDeviceGetUtilizationRates", values, 2) : INVALID_ARGUMENT;
    if (!code) *rates = (nvmlUtilization_t){(unsigned)values[0], (unsigned)values[1]};
    return code;
}

int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned kind, unsigned counter, u64 *count) {
    char key[128];
    snprintf(key, sizeof key, "nvmlDeviceGetTotalEccErrors(%u, %u)", kind, counter);
    return count ? ask_integers(device, key, count, 1) : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link, unsigned counter, u64 *count) {
    char key[128];
    snprintf(key, sizeof key, "nvmlDeviceGetNvLinkErrorCounter(%u, %u)", link, counter);
    return count ? ask_integers(device, key, count, 1) : INVALID_ARGUMENT;
}

int nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    u64 values[4];
    if (!corrected || !uncorrected || !pending || !failed) return INVALID_ARGUMENT;
    int code = ask_integers(device, "nvmlDeviceGetRemappedRows", values, 4);
    if (!code) *corrected = values[0], *uncorrected = values[1], *pending = values[2], *failed = values[3];
    return code;
}

int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields) {
    char key[128], answer[MAX_ANSWER];
    if (!fields || count < 0) return INVALID_ARGUMENT;
    int code = ask_script(device, "nvmlDeviceGetFieldValues", answer);
    if (code && code != UNSCRIPTED) return code; /* A fault of the call as a whole. */
    for (int at = 0; at < count; at++) {
        nvmlFieldValue_t *field = &fields[at];
        u64 value = 0;
        snprintf(key, sizeof key, "nvmlDeviceGetFieldValues(%u, %u)", field->fieldId, field->scopeId);
        field->nvmlReturn = ask_integers(device, key, &value, 1);
        if (field->nvmlReturn == NOT_SUPPORTED) {
            snprintf(key, sizeof key, "nvmlDeviceGetFieldValues(%u)", field->fieldId);
            field->nvmlReturn = ask_integers(device, key, &value, 1);
        }
        if (field->nvmlReturn == UNINITIALIZED || field->nvmlReturn == INVALID_ARGUMENT) return field->nvmlReturn;
        field->timestamp = (long long)(now_s() * 1e6), field->latencyUsec = 1;
        field->valueType = value >> 32 ? 3 : 1; /* NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, NVML_VALUE_TYPE_UNSIGNED_INT */
        field->value.ullVal = 0;
        if (field->valueType == 3) field->value.ullVal = value;
        else field->value.uiVal = (unsigned)value;
    }
    return SUCCESS;
}

/* ---- Processes and MIG ----------------------------------------------------------------------------------------- */

static int processes(nvmlDevice_t device, const char *key, unsigned *count, void *infos, size_t size) {
    char answer[MAX_ANSWER];
    u64 values[MAX_INTS];
    if (!count) return INVALID_ARGUMENT;
    int code = ask(device, key, answer);
    if (code) return code;
    unsigned num_found = integers(answer, values, MAX_INTS) / 4, room = *count;
    *count = num_found;
    if (num_found > room) return INSUFFICIENT_SIZE;
    if (num_found && !infos) return INVALID_ARGUMENT;
    for (unsigned at = 0; at < num_found; at++) {
        u64 *found = values + 4 * at;
        nvmlProcessInfo_v2_t info = {(unsigned)found[0], found[1], (unsigned)found[2], (unsigned)found[3]};
        nvmlProcessInfo_v1_t old = {info.pid, info.usedGpuMemory};
        memcpy((char *)infos + at * size, size == sizeof old ? (void *)&old : (void *)&info, size);
    }
    return SUCCESS;
}

#define PROCESSES(name) \
    int name(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *infos) { return processes(device, #name, count, infos, sizeof *infos); } \
    int name##_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos) { return processes(device, #name, count, infos, sizeof *infos); } \
    int name##_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos) { return processes(device, #name, count, infos, sizeof *infos); }

PROCESSES(nvmlDeviceGetComputeRunningProcesses)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)

int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    u64 values[2];
    if (!current || !pending) return INVALID_ARGUMENT;
    int code = ask_integers(device, "nvmlDeviceGetMigMode", values, 2);
    if (!code) *current = values[0], *pending = values[1];
    return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig) {
    char answer[MAX_ANSWER];
    if (!mig || index >= MAX_MIGS || !is_handle(device) || device->mig != NO_INSTANCE) return INVALID_ARGUMENT;
    int code = ask_script(device + 1 + index, "nvmlDeviceGetUUID", answer);
    if (code == UNSCRIPTED) return NOT_FOUND;
    if (!code) *mig = device + 1 + index;
    return code;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device) {
    if (!device || !is_handle(mig)) return INVALID_ARGUMENT;
    *device = &devices[mig->gpu][0];
    return SUCCESS;
}

/* ---- Events ---------------------------------------------------------------------------------------------------- */

/* Returns the number of events in the script; gives the one at `at` if there is one. */
static int events(int at, int *gpu, u64 *xid) {
    int count = 0;
    for (char *line = script; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        if (!strncmp(line, "event\t", 6) && count++ == at) sscanf(line + 6, "%d\t%llu", gpu, xid);
    return count;
}

/* Returns what tells of changes in the folder of the script: a wait for events sleeps, as in the driver. */
static int watch_script(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s", getenv("NVML_STUB"));
    int changes = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (changes < 0 || inotify_add_watch(changes, dirname(path), IN_MOVED_TO | IN_CLOSE_WRITE) < 0) abort();
    return changes;
}

/* Waits for a change for so many milliseconds at most. */
static void await_change(int changes, int milliseconds) {
    char told[4096];
    struct pollfd wanted = {changes, POLLIN, 0};
    poll(&wanted, 1, milliseconds);
    while (read(changes, told, sizeof told) > 0) continue;
}

int nvmlEventSetCreate(nvmlEventSet_t *set) {
    char answer[MAX_ANSWER];
    int code = ask(NULL, "nvmlEventSetCreate", answer);
    if (code || !set) return code ? code : INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    (*set)->changes = watch_script();
    pthread_mutex_lock(&lock);
    (*set)->told = events(-1, NULL, NULL);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int nvmlEventSetFree(nvmlEventSet_t set) {
    if (set) close(set->changes);
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(nvmlDevice_t device, u64 types, nvmlEventSet_t set) {
    char answer[MAX_ANSWER];
    if (!set || !types) return INVALID_ARGUMENT;
    int code = ask_script(device, "nvmlDeviceRegisterEvents", answer);
    if (!code || code == UNSCRIPTED) set->is_registered[device->gpu] = 1, code = SUCCESS;
    return code;
}

int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, u64 *types) {
    if (!types || !is_handle(device)) return INVALID_ARGUMENT;
    *types = 8;
    return SUCCESS;
}

static int take_event(nvmlEventSet_t set, nvmlEventData_t *data) {
    char answer[MAX_ANSWER];
    int gpu = -1, code = ask_script(NULL, "nvmlEventSetWait", answer);
    u64 xid = 0;
    if (code && code != UNSCRIPTED) return code;
    pthread_mutex_lock(&lock);
    while (set->told < events(set->told, &gpu, &xid)) {
        set->told++;
        if (gpu >= 0 && gpu < MAX_GPUS && set->is_registered[gpu]) break;
        gpu = -1;
    }
    pthread_mutex_unlock(&lock);
    if (gpu >= 0) {
        *data = (nvmlEventData_t){&devices[gpu][0], 8, xid, ~0u, ~0u};
        return SUCCESS;
    }
    for (gpu = 0; gpu < MAX_GPUS; gpu++) /* One lost GPU spoils a set, as NVML does. */
        if (set->is_registered[gpu] && ask(&devices[gpu][0], "nvmlDeviceGetUUID", answer) == GPU_IS_LOST) return GPU_IS_LOST;
    return TIMEOUT;
}

int nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms) {
    if (!set || !data) return INVALID_ARGUMENT;
    unsigned seen = 0;
    for (double deadline_s = now_s() + timeout_ms / 1e3;;) {
        pthread_mutex_lock(&lock);
        reload();
        int is_new = num_reloads != seen;
        seen = num_reloads;
        pthread_mutex_unlock(&lock);
        int code = is_new ? take_event(set, data) : TIMEOUT;
        double left_s = deadline_s - now_s();
        if (code != TIMEOUT || left_s <= 0) return code;
        await_change(set->changes, 1 + (int)(left_s * 1e3));
    }
}

/* ---- The layouts ----------------------------------------------------------------------------------------------- */

#define SIZE(type) used += sprintf(text + used, "\n%s size=%zu", #type, sizeof(type));
#define FIELD(type, name) \
    used += sprintf(text + used, " %s=%zu+%zu", #name, offsetof(type, name), sizeof(((type *)0)->name));

const char *stubAbi(void) {
    static char text[4096]; /* Of each field: where it begins, and its size. */
    int used = 0;
    SIZE(nvmlMemory_t) FIELD(nvmlMemory_t, total) FIELD(nvmlMemory_t, free) FIELD(nvmlMemory_t, used)
    SIZE(nvmlMemory_v2_t) FIELD(nvmlMemory_v2_t, version) FIELD(nvmlMemory_v2_t, total) FIELD(nvmlMemory_v2_t, reserved)
    FIELD(nvmlMemory_v2_t, free) FIELD(nvmlMemory_v2_t, used)
    SIZE(nvmlUtilization_t) FIELD(nvmlUtilization_t, gpu) FIELD(nvmlUtilization_t, memory)
    SIZE(nvmlProcessInfo_v2_t) FIELD(nvmlProcessInfo_v2_t, pid) FIELD(nvmlProcessInfo_v2_t, usedGpuMemory)
    FIELD(nvmlProcessInfo_v2_t, gpuInstanceId) FIELD(nvmlProcessInfo_v2_t, computeInstanceId)
    SIZE(nvmlPciInfo_t) FIELD(nvmlPciInfo_t, busIdLegacy) FIELD(nvmlPciInfo_t, domain) FIELD(nvmlPciInfo_t, bus)
    FIELD(nvmlPciInfo_t, device) FIELD(nvmlPciInfo_t, pciDeviceId) FIELD(nvmlPciInfo_t, pciSubSystemId)
    FIELD(nvmlPciInfo_t, busId)
    SIZE(nvmlEventData_t) FIELD(nvmlEventData_t, device) FIELD(nvmlEventData_t, eventType) FIELD(nvmlEventData_t, eventData)
    FIELD(nvmlEventData_t, gpuInstanceId) FIELD(nvmlEventData_t, computeInstanceId)
    SIZE(nvmlFieldValue_t) FIELD(nvmlFieldValue_t, fieldId) FIELD(nvmlFieldValue_t, scopeId)
    FIELD(nvmlFieldValue_t, timestamp) FIELD(nvmlFieldValue_t, latencyUsec) FIELD(nvmlFieldValue_t, valueType)
    FIELD(nvmlFieldValue_t, nvmlReturn) FIELD(nvmlFieldValue_t, value)
    return text;
}
