/* Compiles models with OpenVINO's NPU compiler: a request per line of stdin, an answer per line of stdout (docs/npu.md).
 *
 *   request: MODEL.xml TAB PROGRAM.blob TAB KEY=VALUE TAB KEY=VALUE ...   in UTF-8; the files lie in the working directory
 *   answer:  staticllm-npu {"ok": true, "seconds": 1.25, "requirements": "..."}
 *        or  staticllm-npu {"ok": false, "stage": "compile", "error": "..."}
 *
 * The first answer needs no request and has the versions. Other lines on stdout come from OpenVINO. The process ends when stdin
 * ends, also during a compile, so that it never outlives the program that started it.
 *
 * It is built with mingw-w64 against the headers and the import library of OpenVINO's Windows wheel, and runs under Wine.
 */
#include <fcntl.h>
#include <io.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

#include <openvino/c/openvino.h>

#define DEVICE "NPU"
#define MAX_REQUEST 65536
#define MAX_PROPERTIES 64
#define MAX_ERROR 8192

static void *volatile request; /* a line of the heap */
static HANDLE has_request;

static void print_text(const char *text) {
  putchar('"');
  for (size_t i = 0; text[i] && i < MAX_ERROR; i++) {
    unsigned char each = (unsigned char)text[i];
    if (each == '"' || each == '\\')
      printf("\\%c", each);
    else if (each < 0x20)
      printf("\\u%04x", each);
    else
      putchar(each);
  }
  putchar('"');
}

static void answer_error(const char *stage, const char *text) {
  printf("staticllm-npu {\"ok\": false, \"stage\": \"%s\", \"error\": ", stage);
  print_text(text ? text : "");
  printf("}\n");
  fflush(stdout);
}

static void answer_versions(ov_core_t *core) {
  ov_version_t version = {0};
  char *compiler = NULL;
  printf("staticllm-npu {\"ok\": true, \"openvino\": ");
  print_text(ov_get_openvino_version(&version) == OK ? version.buildNumber : "");
  printf(", \"compiler\": ");
  print_text(ov_core_get_property(core, DEVICE, "NPU_COMPILER_VERSION", &compiler) == OK ? compiler : "");
  printf("}\n");
  fflush(stdout);
  ov_version_free(&version);
  ov_free(compiler);
}

/* Reads requests while the main thread compiles, to notice the end of stdin at once. */
static DWORD WINAPI read_requests(void *unused) {
  static char line[MAX_REQUEST];
  (void)unused;
  while (fgets(line, sizeof line, stdin) && strchr(line, '\n')) {
    line[strcspn(line, "\r\n")] = 0;
    free(InterlockedExchangePointer(&request, _strdup(line)));
    SetEvent(has_request);
  }
  return TerminateProcess(GetCurrentProcess(), 0);
}

static void compile_request(ov_core_t *core, char *line) {
  ov_property_t properties[MAX_PROPERTIES];
  size_t count = 0;
  char *model_path = strtok(line, "\t"), *blob_path = strtok(NULL, "\t");
  for (char *item = strtok(NULL, "\t"); item; item = strtok(NULL, "\t")) {
    char *equals = strchr(item, '=');
    if (!equals || count == MAX_PROPERTIES) {
      answer_error("request", "a property is not KEY=VALUE, or there are too many");
      return;
    }
    *equals = 0;
    properties[count].key = item;
    properties[count++].value = equals + 1;
  }
  if (!blob_path) {
    answer_error("request", "it names no model and blob");
    return;
  }
  ov_model_t *model = NULL;
  ov_compiled_model_t *compiled = NULL;
  const char *stage = "read";
  ULONGLONG begin = 0, end = 0;
  ov_status_e status = ov_core_read_model(core, model_path, NULL, &model);
  if (status == OK) {
    stage = "compile";
    begin = GetTickCount64();
    status = ov_core_compile_model_props(core, model, DEVICE, count, properties, &compiled);
    end = GetTickCount64();
  }
  if (status == OK) {
    stage = "export";
    status = ov_compiled_model_export_model(compiled, blob_path);
  }
  if (status == OK) {
    char *requirements = NULL;
    printf("staticllm-npu {\"ok\": true, \"seconds\": %.3f, \"requirements\": ", (double)(end - begin) / 1000);
    print_text(ov_compiled_model_get_property(compiled, "RUNTIME_REQUIREMENTS", &requirements) == OK ? requirements : "");
    printf("}\n");
    fflush(stdout);
    ov_free(requirements);
  } else {
    answer_error(stage, ov_get_last_err_msg());
  }
  ov_compiled_model_free(compiled);
  ov_model_free(model);
}

int main(void) {
  ov_core_t *core = NULL;
  SetErrorMode(SEM_FAILCRITICALERRORS | SEM_NOGPFAULTERRORBOX); /* no window after a crash */
  _setmode(_fileno(stdin), _O_BINARY);
  _setmode(_fileno(stdout), _O_BINARY);
  if (ov_core_create(&core) != OK) {
    answer_error("start", ov_get_last_err_msg());
    return 1;
  }
  answer_versions(core);
  has_request = CreateEvent(NULL, FALSE, FALSE, NULL);
  if (!has_request || !CreateThread(NULL, 0, read_requests, NULL, 0, NULL)) {
    answer_error("start", "no thread can be started");
    return 1;
  }
  for (;;) {
    WaitForSingleObject(has_request, INFINITE);
    char *line = InterlockedExchangePointer(&request, NULL);
    if (line) compile_request(core, line);
    free(line);
  }
}
