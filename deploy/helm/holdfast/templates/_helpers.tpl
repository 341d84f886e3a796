{{/* The name of the resources and, with an ordinal, of the nodes: at most 32 characters. */}}
{{- define "holdfast.name" -}}
{{- if contains "holdfast" .Release.Name -}}
{{- .Release.Name | trunc 28 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-holdfast" (.Release.Name | trunc 19 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.gateway.name" -}}
{{- printf "%s-gateway" (include "holdfast.name" . | trunc 20 | trimSuffix "-") -}}
{{- end -}}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "holdfast.gateway.selector" -}}
app.kubernetes.io/name: holdfast-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
{{ include "holdfast.chart" . }}
{{- end -}}

{{- define "holdfast.gateway.labels" -}}
{{ include "holdfast.gateway.selector" . }}
{{ include "holdfast.chart" . }}
{{- end -}}

{{/* The forms of nodes: "holdfast", and "holdfast.gateway" if there are any. */}}
{{- define "holdfast.forms" -}}
holdfast{{ if .Values.gateways.replicas }} holdfast.gateway{{ end }}
{{- end -}}

{{- define "holdfast.chart" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}
