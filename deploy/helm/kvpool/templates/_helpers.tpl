{{- define "kvpool.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "kvpool" $name) }}{{ $name = printf "%s-kvpool" $name }}{{ end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- /* Prometheus takes the name of a job from app.kubernetes.io/name: alerts and dashboard know it. */ -}}
{{- define "kvpool.selector" -}}
app.kubernetes.io/name: kvpool-{{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- end }}
{{- define "kvpool.labels" -}}
{{ include "kvpool.selector" . }}
app.kubernetes.io/part-of: kvpool
{{- end }}

{{- define "kvpool.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Addresses of masters, as JSON. Without the domain of the cluster, which is not known here. */ -}}
{{- define "kvpool.masters" -}}
{{- $name := include "kvpool.name" . | printf "%s-master" -}}
{{- $domain := printf "%s.svc:7450" .Release.Namespace -}}
{{- $all := list -}}
{{- if eq (int .Values.masters.replicas) 1 }}
{{- $all = append $all (printf "%s.%s" $name $domain) }}
{{- else }}
{{- range $n := until (int .Values.masters.replicas) }}
{{- $all = append $all (printf "%s-%d.%s.%s" $name $n $name $domain) }}
{{- end }}
{{- end }}
{{- $all | toJson -}}
{{- end }}

{{- /* Bytes of a size in kvpool's units. */ -}}
{{- define "kvpool.bytes" -}}
{{- $factors := dict "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- mulf (regexFind "^[0-9.]+" .) (get $factors (regexFind "[A-Z].*$" .)) | ceil | int64 -}}
{{- end }}

{{- /* Seconds of a duration. */ -}}
{{- define "kvpool.seconds" -}}
{{- mul (regexFind "^[0-9]+" .) (get (dict "s" 1 "m" 60 "h" 3600) (regexFind "[a-z]$" .)) -}}
{{- end }}

{{- define "kvpool.tiers" -}}
- dram:{{ .Values.servers.capacity }}
{{- range $n, $disk := .Values.servers.disks }}
- nvme:/disks/{{ $n }}/blocks:{{ $disk.size }}{{ $.Values.servers.encrypt | ternary "?encrypt=yes" "" }}
{{- end }}
{{- end }}

{{- /* pool.yaml, as a dictionary in YAML. */ -}}
{{- define "kvpool.config" -}}
{{- $servers := .Values.servers -}}
{{- $masters := include "kvpool.masters" . | fromJsonArray -}}
{{- $master := dict "blocks_max" (int64 .Values.masters.blocksMax) -}}
{{- $server := dict "masters" $masters "flush_s" $servers.flush "drain_s" $servers.drain -}}
{{- $client := dict "masters" $masters -}}
{{- if $servers.disks }}
{{- $_ := set $server "tiers" (include "kvpool.tiers" . | fromYamlArray) }}
{{- $_ := set $server "write_mode" $servers.writeMode }}
{{- $_ := set $server "back_in_s" $servers.backIn }}
{{- else }}
{{- $_ := set $server "capacity" $servers.capacity }}
{{- end }}
{{- with $servers.policy }}{{ $_ := set $server "policy" . }}{{ end }}
{{- with $servers.rdma }}
{{- if .resource }}
{{- $_ := set $server "insecure" true }}
{{- $_ := set $client "transports" (list "inproc" "shm" (printf "ucx?tls=%s&rails=%d" .lanes (int .rails)) "tcp") }}
{{- end }}
{{- end }}
{{- range $section, $known := dict "server" (dict "capacity" "capacity" "tiers" "disks" "write_mode" "writeMode" "drain_s" "drain" "back_in_s" "backIn" "flush_s" "flush" "policy" "policy" "http" "http" "id" "kind" "listen" "kind" "masters" "") "master" (dict "blocks_max" "blocksMax" "http" "http" "bind" "") }}
{{- range $key := get $.Values.config $section | default dict | keys | sortAlpha }}
{{- if hasKey $known $key }}
{{- fail (printf "config.%s.%s: the chart sets it, %s" $section $key (get $known $key | empty | ternary "and ports and names of pods depend on it" (printf "say %ss.%s" $section (get $known $key)))) }}
{{- end }}
{{- end }}
{{- end }}
{{- $all := dict "cluster" .Values.cluster "secret_file" "/run/secrets/kvpool/secret" "master" $master "server" $server "client" $client -}}
{{- mergeOverwrite $all (deepCopy .Values.config) | toYaml -}}
{{- end }}

{{- /* A pod is made anew when its own part of the configuration changes, and not for the other's. */ -}}
{{- define "kvpool.checksum" -}}
{{- $config := include "kvpool.config" .root | fromYaml -}}
{{- omit $config (eq .part "master" | ternary "server" "master") "client" | toJson | sha256sum -}}
{{- end }}

{{- /* No proxy of a mesh between: blocks and probes go straight, and the pool proves by itself who asks. */ -}}
{{- define "kvpool.podMetadata" -}}
labels: {{- include "kvpool.labels" . | nindent 2 }}
  sidecar.istio.io/inject: "false"
annotations:
  linkerd.io/inject: disabled
  checksum/config: {{ include "kvpool.checksum" . }}
{{- end }}

{{- define "kvpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: 7450
runAsGroup: 7450
fsGroup: 7450  # who may read the secret
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Which nodes, and who goes first. */ -}}
{{- define "kvpool.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{- /* The kubelet asks over HTTP, straight and not through a proxy; the page ends the oldest request
of whoever has most, so strangers do not keep it out. Without the page a port that opens must do. */ -}}
{{- define "kvpool.probes" -}}
{{- if .http }}
startupProbe:
  httpGet: {path: /health, port: http{{ .host }}}
  periodSeconds: 2
  failureThreshold: {{ .startup }}
readinessProbe:
  httpGet: {path: /ready, port: http{{ .host }}}
  periodSeconds: 2
livenessProbe:
  httpGet: {path: /health, port: http{{ .host }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- else }}
startupProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 2
  failureThreshold: {{ .startup }}
readinessProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 2
{{- end }}
{{- end }}

{{- define "kvpool.podIP" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
