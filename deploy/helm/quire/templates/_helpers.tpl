{{- define "quire.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- $name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "quire.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "quire.args" -}}
{{- $name := include "quire.name" . }}
{{- $args := list }}
{{- with .Values.model }}{{ $args = append $args . }}{{ end }}
{{- range .Values.servedModelNames }}{{ $args = concat $args (list "--served-model-name" .) }}{{ end }}
{{- $args = concat $args .Values.extraArgs }}
{{- /* A server answers to names that it knows: those of the Service and of the Ingress. */}}
{{- range concat (list $name "*.svc" "*.svc.cluster.local") .Values.allowedHosts }}{{ $args = concat $args (list "--allowed-hosts" .) }}{{ end }}
{{- $args = concat $args (list "--shutdown-timeout" (toString .Values.shutdownTimeout)) }}
{{- if .Values.keys.file }}{{ $args = concat $args (list "--api-key-file" "/etc/quire/keys.toml") }}{{ end }}
{{- if .Values.files.enabled }}
{{- $args = concat $args (list "--files-dir" "/var/lib/quire-files") }}
{{- with .Values.files.quota }}{{ $args = concat $args (list "--files-quota" .) }}{{ end }}
{{- end }}
{{- toYaml $args }}
{{- end }}
