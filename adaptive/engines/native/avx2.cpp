#include "draft.h"
